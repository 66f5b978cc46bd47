"""Steps that are planned before the answers to earlier ones."""

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run_ahead, suspect

from scheduler_service.core import (
    ModelOutput,
    PreemptionMode,
    WaitingQueue,
)


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_planning_ahead_gives_the_tokens_of_the_synchronous_loop(num_ahead: int, mode: PreemptionMode) -> None:
    scheduler = make_scheduler(num_device_blocks=12, num_host_blocks=12, preemption_mode=mode)
    groups = [make_group(str(i), 3 * i + 1, root=bytes(i), n=1 + i % 3, max_tokens=9) for i in range(5)]
    for group in groups:
        scheduler.add_request(group)
    run_ahead(scheduler, FakeWorker(scheduler.config), num_ahead)
    assert sum(scheduler.num_preemptions.values()) > 0
    for group in groups:
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 64)


def test_a_sequence_that_stopped_unforeseen_wastes_one_slot_a_step_ahead_and_nothing_else() -> None:
    scheduler = make_scheduler()
    group = make_group("a", 3, max_tokens=20)
    expected = reference_output(group, 0, 64)
    stops = make_group("a", 3, max_tokens=20, stop_token_ids=frozenset({expected[3]}))
    scheduler.add_request(stops)
    steps = run_ahead(scheduler, FakeWorker(scheduler.config), 1)
    assert output_of(stops) == expected[:4]
    assert [bool(output.scheduled) for output in steps] == [True] * 5 + [False]  # the last one says that it finished


def test_a_sequence_whose_last_token_is_in_flight_is_not_scheduled_again() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_group("a", 3, max_tokens=5))
    steps = run_ahead(scheduler, FakeWorker(scheduler.config), 3)
    assert [bool(output.scheduled) for output in steps] == [True] * 5 + [False]


def test_a_suspect_has_the_worker_to_itself_also_when_planning_ahead() -> None:
    waiting = WaitingQueue()
    for name in ("suspect", "other"):
        waiting.append(make_group(name, 4))
    suspect(waiting.head)
    scheduler = make_scheduler(waiting)
    alone = scheduler.schedule()
    assert list(plan(alone)) == ["suspect"]
    assert scheduler.schedule().is_empty
    scheduler.update_from_output(alone, ModelOutput(1, [3]))
    assert list(plan(scheduler.schedule())) == ["suspect", "other"]
