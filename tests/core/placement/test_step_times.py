"""What a step takes is learnt from steps of several sizes; one stalled step spoils neither that nor a good name."""

import pytest

from scheduler_service.core.placement.step_times import Slowness, StepTimes


def test_the_fixed_part_and_that_of_a_token_are_told_apart() -> None:
    times = StepTimes()
    for number in range(300):
        num_tokens = (1, 8, 500, 2048)[number % 4]
        times.observe(num_tokens, 0.02 + 0.0005 * num_tokens)
    assert times.fixed == pytest.approx(0.02, rel=0.01)
    assert times.per_token == pytest.approx(0.0005, rel=0.01)
    assert times.seconds(100) == pytest.approx(0.07, rel=0.01)


def test_while_all_steps_are_alike_a_token_takes_what_the_worker_measured() -> None:
    times = StepTimes()
    times.expect(2_000)
    for _ in range(300):
        times.observe(32, 0.05)
    times.expect(1)  # too late: there are measurements
    assert times.per_token == pytest.approx(1 / 2_000)
    assert times.seconds(32) == pytest.approx(0.05)


def test_neither_part_is_negative() -> None:
    """Steps of more tokens that take less time: noise."""
    times = StepTimes()
    for number in range(100):
        times.observe(*((10, 0.05), (500, 0.01))[number % 2])
    assert times.fixed >= 0
    assert times.per_token > 0


def test_it_forgets() -> None:
    times = StepTimes()
    for _ in range(1_000):
        times.observe(100, 0.01)
    for _ in range(5_000):
        times.observe(100, 0.03)
    assert times.seconds(100) == pytest.approx(0.03, rel=0.01)


def test_a_stalled_step_changes_little() -> None:
    times, slowness = StepTimes(), Slowness()
    for _ in range(100):
        slowness.observe(times.observe(100, 0.01))
    slowness.observe(times.observe(100, 60.0))
    assert times.seconds(100) < 0.012
    assert slowness.speed == 1000


@pytest.mark.parametrize(("ratio", "speed"), [(1.2, 1000), (0.85, 1000), (1.3, 769), (4.0, 250), (0.5, 2000)])
def test_what_differs_by_more_than_noise_counts(ratio: float, speed: int) -> None:
    slowness = Slowness()
    for _ in range(200):
        slowness.observe(ratio)
    assert slowness.speed == speed
