"""A prefix that several requests need is computed once."""

import pytest
from fake_worker import FakeWorker, reference_output
from placement_helpers import add, answer, left, make_fleet, reasons, taken
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, run_ahead, step

from scheduler_service.core import (
    FairQueue,
    PlacementReason,
    PriorityQueue,
    SamplingParams,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.planning import shared_prefixes
from scheduler_service.core.queues import waiting_queue


def test_a_prefix_is_shared_within_the_step_that_computes_it() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    groups = [make_group(name, 11) for name in ("first", "second", "third")]
    for group in groups:
        scheduler.add_request(group)
    assert plan(step(scheduler, worker)) == {"first": [11], "second": [3], "third": [3]}
    assert scheduler.blocks.device.num_free == 16 - 2 - 3
    run(scheduler, worker)
    assert [output_of(group) for group in groups] == [reference_output(groups[0], 0, 64)] * 3


def test_requests_that_arrive_together_compute_a_long_prefix_once() -> None:
    """Eight prompts of 40 tokens, of which 36 are found: 40 + 7 * 4 tokens in place of 320."""
    scheduler = make_scheduler(num_device_blocks=64, max_num_batched_tokens=16, max_prefill_chunk=8)
    worker = FakeWorker(scheduler.config)
    groups = [make_group(str(number), 40, max_tokens=1) for number in range(8)]
    for group in groups:
        scheduler.add_request(group)
    steps = run_ahead(scheduler, worker, 1)
    assert sum(output.num_tokens for output in steps) == 40 + 7 * 4
    assert len([output for output in steps if output.scheduled]) == 5  # of 16 tokens at most
    assert {group.history.num_cached_tokens for group in groups[1:]} == {36}


def test_a_request_that_waits_for_a_prefix_is_admitted_in_the_step_that_plans_its_end() -> None:
    """The first chunk is short because others may want the rest; when none does, the prompt is given it."""
    scheduler = make_scheduler(max_num_batched_tokens=32, max_prefill_chunk=8)
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 20))
    assert plan(scheduler.schedule()) == {"first": [20], "second": [4]}


def test_requests_behind_one_that_waits_for_a_prefix_go_on() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_prefill_chunk=8)
    for name, root in (("first", b""), ("second", b""), ("other", b"other")):
        scheduler.add_request(make_group(name, 24 if root == b"" else 8, root=root))
    assert plan(scheduler.schedule()) == {"first": [8], "other": [8]}


def test_a_request_waits_no_longer_than_computing_takes_while_nothing_comes_of_the_prefix() -> None:
    """Four decodes leave two tokens of each step, a block has four, and a worker computes one in a second."""
    scheduler = make_scheduler(
        max_num_batched_tokens=6,
        max_num_seqs=6,
        num_device_blocks=64,
        max_prefill_chunk=1,
        prefill_tokens_per_second=1,
    )
    worker = FakeWorker(scheduler.config)
    for number in range(4):
        scheduler.add_request(make_group(f"decode {number}", 1, root=b"%d" % number, max_tokens=50))
    step(scheduler, worker)
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 24))
    chunks = []
    # The second step fills a block: 20 tokens of "second" are missing then, behind 26 that run. The fourth fills
    # another one: 16 are missing then, behind 22.
    for now in (0, 10, 50, 51, 90):
        output = scheduler.schedule(now)
        scheduler.update_from_output(output, worker.execute(output))
        chunks.append([plan(output).get(name) for name in ("first", "second")])
    assert chunks == [[[2], None]] * 4 + [[[1], [1]]]


def test_a_request_goes_on_by_itself_when_the_other_is_aborted_and_finds_what_steps_in_flight_compute() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    first, second = (make_group(name, 24) for name in ("first", "second"))
    scheduler.add_request(first)
    scheduler.add_request(second)
    in_flight = scheduler.schedule()
    scheduler.finish_requests(["first"], SequenceStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    assert plan(output) == {"second": [8]}
    assert second.history.num_cached_tokens == 8
    for sent in (in_flight, output):
        scheduler.update_from_output(sent, worker.execute(sent))
    run(scheduler, worker)
    assert output_of(second) == reference_output(second, 0, 64)
    assert scheduler.blocks.device.num_free == 16


def test_a_session_that_is_lost_takes_what_its_steps_were_to_compute_with_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 24))
    scheduler.schedule()
    scheduler.release_all()
    again = make_scheduler(scheduler.waiting, max_num_batched_tokens=8)
    again.schedule()
    assert again.waiting.head.request_id == "second"
    assert [group.history.num_cached_tokens for group in again.running] == [0]


def test_a_group_that_computes_for_another_one_leaves_no_step_that_is_being_planned() -> None:
    """Another request outranks it, and would have it preempted. Then what the first one relies on were not computed."""
    scheduler = make_scheduler(PriorityQueue(64), num_device_blocks=6, max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    low, shares, outranks = groups = [
        make_group("low", 12, priority=5, max_tokens=3),
        make_group("shares", 14, priority=1, max_tokens=3),
        make_group("outranks", 12, priority=2, root=b"other", max_tokens=3),
    ]
    scheduler.add_request(low)
    assert plan(step(scheduler, worker)) == {"low": [8]}
    scheduler.add_request(shares)
    scheduler.add_request(outranks)
    assert plan(step(scheduler, worker)) == {"low": [4], "shares": [2]}
    run(scheduler, worker)
    for group in groups:
        assert output_of(group) == reference_output(group, 0, 64)


def test_a_request_is_drawn_to_the_worker_that_computes_its_prefix() -> None:
    other, computing = fleet = make_fleet(2, max_num_batched_tokens=64, max_num_seqs=32)
    other.set_admission(False)
    add(fleet, make_group("first", 400))
    for _ in range(4):  # 144 tokens are left; what is cached of the others alone would not make up for the backlog
        answer(computing, computing.schedule(), 0.0)
    other.set_admission(True)
    add(fleet, make_group("again", 400))
    output = other.schedule()
    assert left(output) == {"again": computing}
    assert reasons(output) == {"again": PlacementReason.AFFINITY}
    assert taken(computing.schedule()) == []  # it waits there


def test_requests_wait_for_a_prefix_again_after_the_loss_of_a_worker() -> None:
    """Their waits are of a worker's session: what was left to wait for there says nothing of the next one."""
    scheduler = make_scheduler(worker="w", max_num_batched_tokens=16, num_device_blocks=64, max_prefill_chunk=4)
    worker = FakeWorker(scheduler.config)
    for number in range(3):
        scheduler.add_request(make_group(str(number), 40, max_tokens=1))
    for now in range(2):  # 32 tokens are there; steps take longer than computing should
        output = scheduler.schedule(now)
        scheduler.update_from_output(output, worker.execute(output))
    scheduler.release_all()
    again = make_scheduler(scheduler.waiting, "w", max_num_batched_tokens=16, num_device_blocks=64, max_prefill_chunk=4)
    worker, num_tokens = FakeWorker(again.config), 0
    while again.has_work:
        output = again.schedule(100.0)
        if not output.is_empty:
            again.update_from_output(output, worker.execute(output), 100.0)
        num_tokens += output.num_tokens
    assert num_tokens == 40 + 2 * 4


def test_a_request_that_waits_for_a_prefix_keeps_its_place_among_the_sequences() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4, num_device_blocks=64, max_prefill_chunk=4)
    for name in ("first", "shares"):
        scheduler.add_request(make_group(name, 40))
    for number in range(4):
        scheduler.add_request(make_group(f"behind {number}", 1, root=b"%d" % number, max_tokens=20))
    worker = FakeWorker(scheduler.config)
    output = step(scheduler, worker)
    while "shares" not in plan(output):
        assert len(plan(output)) <= 3
        output = step(scheduler, worker)
    assert "first" in {group.request_id for group in scheduler.running}


def test_of_requests_that_have_waited_for_a_block_for_too_long_one_goes_on_and_the_time_of_others_begins_anew() -> None:
    """Five decodes leave three tokens of each step, which fill no block."""
    scheduler = make_scheduler(block_size=8, max_num_batched_tokens=8, num_device_blocks=99, max_prefill_chunk=1)
    worker = FakeWorker(scheduler.config)
    for number in range(5):
        scheduler.add_request(make_group(f"decode {number}", 1, root=b"%d" % number, max_tokens=50))
    step(scheduler, worker)
    for name in ("first", "a", "b"):
        scheduler.add_request(make_group(name, 24))
    admitted = []
    for now in (0.0, 1.0, 1.0):
        output = scheduler.schedule(now)
        scheduler.update_from_output(output, worker.execute(output))
        admitted.append([name for name in ("a", "b") if name not in scheduler.waiting])
    assert admitted == [[], ["a"], ["a"]]


def test_requests_behind_long_prompts_wait_for_their_prefix_to_be_computed_once() -> None:
    """Of eight long chunks each is half as long as the one before it: the prefix takes much longer than alone."""
    sizes = {"max_num_batched_tokens": 256, "max_prefill_chunk": 64, "num_device_blocks": 4000, "max_model_len": 2000}
    scheduler = make_scheduler(**sizes, max_num_seqs=64)
    worker = FakeWorker(scheduler.config)
    for number in range(8):
        scheduler.add_request(make_group(f"long {number}", 1000, root=b"%d" % number, max_tokens=1))
    for number in range(6):
        scheduler.add_request(make_group(f"shares {number}", 200, max_tokens=1))
    now, num_tokens = 0.0, 0
    while scheduler.has_work:
        output = scheduler.schedule(now)
        num_tokens += output.num_tokens
        now += output.num_tokens / 10_000
        scheduler.update_from_output(output, worker.execute(output), now)
    assert num_tokens == 8 * 1000 + 200 + 5 * 4


def test_a_tenant_whose_requests_wait_for_a_prefix_does_not_keep_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_queue, "MAX_SHARING", 2)
    for waiting, names in ((FairQueue(), {"first", "other"}), (WaitingQueue(), {"first"})):
        scheduler = make_scheduler(waiting, max_num_batched_tokens=16, max_prefill_chunk=8)
        waiting.charge(make_group("before", 1, tenant="b"), 1000, 0)
        for number, name in enumerate(("first", "second", "third", "fourth", "other")):
            tenant, root = ("b", b"other") if name == "other" else ("a", b"")
            scheduler.add_request(make_group(name, 24 - number, root=root, tenant=tenant))
        assert set(plan(scheduler.schedule())) == names


def test_a_request_that_never_fits_is_refused_though_it_could_wait_for_a_prefix() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_prefill_chunk=4)
    scheduler.add_request(make_group("first", 24))
    scheduler.add_request(make_group("many", 24, n=9))
    assert [group.request_id for group in scheduler.schedule().ignored] == ["many"]


def test_a_request_that_waited_is_refused_by_a_session_that_it_never_fits() -> None:
    scheduler = make_scheduler(worker="w", max_num_batched_tokens=8, max_prefill_chunk=4, num_device_blocks=16)
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 24))
    assert set(plan(scheduler.schedule())) == {"first"}
    scheduler.release_all()
    again = make_scheduler(scheduler.waiting, "w", max_num_batched_tokens=8, num_device_blocks=4)
    assert [group.request_id for group in again.schedule().ignored] == ["first", "second"]


def test_a_step_looks_up_a_limited_number_of_blocks_for_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty requests, which find ten blocks at first and then one or two more in every step. They have two prompts,
    which part behind the fifth block."""
    most = 30
    monkeypatch.setattr(shared_prefixes, "MAX_LOOKED_UP", most)
    scheduler = make_scheduler(max_num_batched_tokens=8, max_prefill_chunk=4, num_device_blocks=99)
    worker = FakeWorker(scheduler.config)
    prompts = [range(60), [*range(20), *range(100, 140)]]
    for number in range(2):
        scheduler.add_request(SequenceGroup(f"first {number}", prompts[number], SamplingParams(max_tokens=1)))
    for _ in range(8):
        step(scheduler, worker)
    groups = [SequenceGroup(str(number), prompts[number % 2], SamplingParams(max_tokens=1)) for number in range(20)]
    for group in groups:
        scheduler.add_request(group)
    looked_up = []

    class Heard(dict[object, int]):
        def __contains__(self, key: object) -> bool:
            looked_up[-1] += 1
            return super().__contains__(key)

    device = scheduler.blocks.device
    device._by_key = Heard(device._by_key)
    while not all(group.is_finished for group in groups):
        looked_up.append(0)
        step(scheduler, worker)
    assert 10 < looked_up[0] <= max(looked_up) < most + 15
