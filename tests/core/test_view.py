"""All frames of a viewer, applied in order, give the state that a new viewer sees; without a viewer nothing is kept."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from fake_worker import FakeWorker
from page_states import RATES, State, apply_frame, new_state, state_of
from scheduler_helpers import make_group, make_scheduler, step
from workloads import random_config, random_request

from scheduler_service.core import BlockAllocator, FairQueue, PriorityQueue, Scheduler, WaitingQueue
from scheduler_service.core.config import LayerGroup
from scheduler_service.view.observer import Frame, Observer
from scheduler_service.view.pool import PoolView
from scheduler_service.view.workers import WorkerNow


def sent(frame: Frame) -> dict[str, Any]:
    """A frame as a page reads it."""
    return json.loads(json.dumps(frame))  # type: ignore[no-any-return]


def without_rates(state: State) -> State:
    """Rates depend on the times of earlier looks."""
    for worker in state["workers"].values():
        worker |= dict.fromkeys(RATES, 0)
    return state


def seen_anew(scheduler: Scheduler, workers: list[WorkerNow], waiting: WaitingQueue, now: float) -> State:
    """The state that a new observer sees, whose collections of changes replace none of an older one."""
    pools = (scheduler.blocks.device, scheduler.blocks.host)
    changes = [pool.changed for pool in pools]
    other = Observer()
    other.look(now, workers, waiting, {})
    for pool, changed in zip(pools, changes, strict=True):
        pool.changed = changed
    return without_rates(state_of([sent(other.snapshot())]))


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
@pytest.mark.parametrize("seed", range(12))
def test_frames_lead_to_the_state_of_a_new_snapshot(policy: Callable[[], WaitingQueue], seed: int) -> None:
    random = Random(f"{seed} {policy.__name__}")
    config, waiting = random_config(random, [4, 8, 16, 24]), policy()
    scheduler, worker = Scheduler(config, waiting, "here"), FakeWorker(config)
    observer, state = Observer(), new_state()
    requests = [random_request(random, number) for number in range(15)]
    in_flight = []
    for now in range(80):
        if now % 2 == 0 and now // 2 < len(requests):
            scheduler.add_request(requests[now // 2].group(now))
        if now == 25:
            scheduler.release_all(now)
            in_flight.clear()
            scheduler, worker = Scheduler(config, waiting, "here", now), FakeWorker(config)
        output = scheduler.schedule(now)
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == 2):
            scheduler.update_from_output(*in_flight.pop(0), now + 0.5)
        if random.random() < 0.5:
            workers = [WorkerNow("here", "serving", scheduler, epoch=now // 25, losses=int(now >= 25))]
            apply_frame(state, sent(observer.look(now, workers, waiting, {})))
            seen = seen_anew(scheduler, workers, waiting, now)
            assert without_rates(state_of([sent(observer.snapshot())])) == seen
            assert without_rates(state) == seen
    observer.close()
    assert scheduler.blocks.device.changed is None
    assert scheduler.blocks.host.changed is None


def test_blocks_are_counted_by_kind_of_layers_where_a_worker_has_several_groups() -> None:
    layouts = (), (LayerGroup(4), LayerGroup(4, window=5), LayerGroup(0), LayerGroup(0))
    seen = []
    for number, layers in enumerate(layouts):
        scheduler, observer = make_scheduler(num_device_blocks=40, layer_groups=layers), Observer()
        worker = FakeWorker(scheduler.config)
        scheduler.add_request(make_group("a", 18, max_tokens=20))
        for _ in range(4):
            step(scheduler, worker)
        observer.look(number, [WorkerNow("here", "serving", scheduler)], WaitingQueue(), {})
        seen.append(sent(observer.snapshot())["workers"]["here"]["layer_groups"])
        observer.close()
    # After 20 computed tokens. The states after 16 of them are kept.
    assert seen == [{}, {"full": [5, 0], "window 5": [2, 3], "states": [2, 2]}]


def test_a_look_reads_the_changed_blocks_alone() -> None:
    blocks, view = BlockAllocator(100_000), PoolView()
    assert view.begin(blocks) == []
    held = [blocks.allocate() for _ in range(3)]
    blocks.share(held[1])
    blocks.free(held[2])
    assert held == [0, 1, 2]
    assert view.look() == [(0, "12")]
    blocks.publish(0, b"key", b"root")
    blocks.free(0)
    assert view.look() == [(0, "3")]
    blocks.withdraw_all()
    assert view.look() == [(0, "0")]
    assert view.all_runs() == [(1, "2")]
    assert view.look() == []
    view.end()
    assert blocks.changed is None


def test_blocks_with_more_holders_than_a_byte_counts_are_shared() -> None:
    blocks, view = BlockAllocator(2), PoolView()
    blocks.allocate()
    for _ in range(300):
        blocks.share(0)
    assert view.begin(blocks) == [(0, "20")]
