import pytest

from bench.loads.load import CONTEXT, LOADS, Load, busy_prefix, capped, replayed, shared_prefix
from scheduler_service.simulation.trace import Arrival


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [
        ((100, 20), (100, 20)),
        ((CONTEXT - 20, 20), (CONTEXT - 20, 20)),
        ((CONTEXT, 20), (CONTEXT - 20, 20)),
        ((100, CONTEXT), (100, CONTEXT // 2)),
        ((2 * CONTEXT, 2 * CONTEXT), (CONTEXT // 2, CONTEXT // 2)),
    ],
)
def test_a_request_too_long_is_cut_to_the_context(tokens: tuple[int, int], cut: tuple[int, int]) -> None:
    assert capped(Arrival(1.5, *tokens)) == Arrival(1.5, *cut)


def test_a_trace_comes_at_its_own_times_and_nothing_waits_for_a_place() -> None:
    load = replayed([Arrival(0.0, 10, 5), Arrival(0.5, 5000, 7)], speedup=2.0)
    assert [arrival.at for arrival in load.arrivals] == [0.0, 0.5]
    assert load.concurrency == 2
    assert [len(prompt) for prompt in load.prompts(100, 0)] == [10, CONTEXT - 7]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_prompts_have_the_lengths_asked_for_and_are_the_same_for_the_same_seed(load: Load) -> None:
    prompts = load.prompts(1000, 1)
    assert [len(prompt) for prompt in prompts] == [arrival.prompt_tokens for arrival in load.arrivals]
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert prompts == load.prompts(1000, 1)


def test_only_a_load_of_its_own_seed_shares_its_prefix() -> None:
    load = shared_prefix(100, 10, 5, num_requests=3)
    prompts, others = load.prompts(1000, 0), load.prompts(1000, "warm-up")
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert prompts[0][:16] != others[0][:16]


def test_streams_that_run_before_share_nothing_with_the_requests_that_come_together() -> None:
    load = busy_prefix(100, 10, 5, num_requests=3)
    prompts = load.prompts(1000, 0)
    assert [arrival.at for arrival in load.arrivals] == [0.0] * 4 + [0.5] * 3
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 4 + 1


def test_a_warm_up_is_short_and_of_the_same_shape() -> None:
    for load in LOADS:
        warm_up = load.warm_up()
        assert 1 <= len(warm_up.arrivals) <= load.concurrency
        assert warm_up.arrivals[0].prompt_tokens == load.arrivals[0].prompt_tokens
        assert sum(arrival.prompt_tokens for arrival in warm_up.arrivals) <= 8192 + 1024
        assert max(arrival.output_tokens for arrival in warm_up.arrivals) == 8


def test_names_tell_loads_apart() -> None:
    assert len({load.name for load in LOADS}) == len({load.title for load in LOADS}) == len(LOADS)
