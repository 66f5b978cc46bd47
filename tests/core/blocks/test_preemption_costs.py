"""A preempted group computes as many tokens again as the scheduler expected."""

import pytest
from fake_worker import FakeWorker
from scheduler_helpers import make_group, make_scheduler, plan, run, step

from scheduler_service.core import PreemptionMode, PriorityQueue, Scheduler, SequenceGroup
from scheduler_service.core.config import LayerGroup

PLAIN = (LayerGroup(4),)
WINDOWS = (LayerGroup(4), LayerGroup(4, window=5))
STATES = (LayerGroup(4), LayerGroup(0))


def beside_another(
    layers: tuple[LayerGroup, ...], num_tokens: int, num_steps: int, **sizes: object
) -> tuple[Scheduler, FakeWorker, SequenceGroup]:
    """A victim that began with the first 32 tokens of another running group, and has since been in `num_steps` steps.
    There is no room for a third sequence."""
    scheduler = make_scheduler(PriorityQueue(), num_device_blocks=64, max_num_seqs=2, layer_groups=layers, **sizes)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("other", 34, max_tokens=28))
    for _ in range(3):
        step(scheduler, worker)
    victim = make_group("victim", num_tokens, priority=1, max_tokens=20)
    victim.prompt_token_ids[34:] = type(victim.prompt_token_ids)("I", [99] * (num_tokens - 34))
    scheduler.add_request(victim)
    for _ in range(num_steps):
        step(scheduler, worker)
    assert victim.history.num_cached_tokens == 32
    return scheduler, worker, victim


def preempt(scheduler: Scheduler, worker: FakeWorker) -> None:
    """Let an urgent request take the victim's place for one step."""
    scheduler.add_request(make_group("urgent", 1, priority=-1, max_tokens=1, root=b"urgent"))
    assert "victim" not in plan(step(scheduler, worker))


@pytest.mark.parametrize(
    ("layers", "num_left", "num_kept"),
    [
        (PLAIN, 0, 32),
        (WINDOWS, 0, 0),  # the other group still has the whole prefix, but not in the layers with a window
        (STATES, 2, 32),  # the states after the common prefix, and those after the victim's prompt
        (STATES, 0, 0),
    ],
)
def test_a_victim_computes_again_what_was_expected(
    layers: tuple[LayerGroup, ...], num_left: int, num_kept: int
) -> None:
    """After the preemption, other sequences use all free blocks except the last `num_left`."""
    scheduler, worker, victim = beside_another(layers, 44, 8)
    sequence, device = victim.sequences[0], scheduler.blocks.device
    if not num_left:
        evict(scheduler, 0)
    expected, num_computed = scheduler.blocks.costs.num_tokens_to_recompute(victim), sequence.num_computed_tokens
    preempt(scheduler, worker)
    assert scheduler.num_preemptions[PreemptionMode.RECOMPUTE] == 1
    evict(scheduler, num_left)
    assert len(device.cached) == num_left
    num_again = 0
    while sequence.num_computed_tokens < num_computed:
        num_again += sum(plan(step(scheduler, worker)).get("victim", []))
    num_again -= sequence.num_computed_tokens - num_computed
    assert expected == num_again == num_computed - num_kept
    run(scheduler, worker)


def evict(scheduler: Scheduler, num_left: int) -> None:
    """Evict the oldest cached blocks, as if other sequences needed them."""
    cached = [*scheduler.blocks.device.cached]
    for block in cached[: max(0, len(cached) - num_left)]:
        scheduler.blocks.device.withdraw(block)


@pytest.mark.parametrize(
    ("layers", "num_tokens", "num_steps", "mode"),
    [(WINDOWS, 44, 8, PreemptionMode.SWAP), (STATES, 38, 2, PreemptionMode.RECOMPUTE)],
)
def test_auto_swaps_if_a_window_is_gone_and_computes_again_behind_kept_states(
    layers: tuple[LayerGroup, ...], num_tokens: int, num_steps: int, mode: PreemptionMode
) -> None:
    """A block is copied in the time that a token takes."""
    scheduler, worker, _ = beside_another(
        layers,
        num_tokens,
        num_steps,
        num_host_blocks=64,
        preemption_mode=PreemptionMode.AUTO,
        block_bytes=1,
        swap_bytes_per_second=1,
        prefill_tokens_per_second=1,
    )
    if layers is WINDOWS:
        evict(scheduler, 0)
    preempt(scheduler, worker)
    assert scheduler.num_preemptions[mode] == 1
    run(scheduler, worker)
