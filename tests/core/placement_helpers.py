"""Several schedulers that share a queue."""

from scheduler_helpers import make_group, make_scheduler

from scheduler_service.core import (
    ModelOutput,
    PlacementReason,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    WaitingQueue,
)

ROOMY = {"num_device_blocks": 400, "max_num_batched_tokens": 1000, "max_num_seqs": 64, "max_model_len": 1000}


def make_fleet(number: int, waiting: WaitingQueue | None = None, **sizes: object) -> list[Scheduler]:
    waiting = WaitingQueue() if waiting is None else waiting
    return [make_scheduler(waiting, **ROOMY | sizes) for _ in range(number)]


def add(fleet: list[Scheduler], *groups: SequenceGroup) -> None:
    for group in groups:
        fleet[0].add_request(group)


def taken(output: SchedulerOutput) -> list[str]:
    return [placement.group.request_id for placement in output.placements if placement.to is None]


def left(output: SchedulerOutput) -> dict[str, object]:
    return {placement.group.request_id: placement.to for placement in output.placements if placement.to is not None}


def reasons(output: SchedulerOutput) -> dict[str, PlacementReason]:
    return {placement.group.request_id: placement.reason for placement in output.placements}


def unlike(name: str, num_tokens: int = 6, **about: object) -> SequenceGroup:
    """A group that shares no prefix."""
    return make_group(name, num_tokens, root=name.encode(), **about)  # type: ignore[arg-type]


def answer(scheduler: Scheduler, output: SchedulerOutput, now: float) -> None:
    scheduler.update_from_output(output, ModelOutput(output.step_id, [7] * output.num_samples), now)


def finish(scheduler: Scheduler) -> None:
    """Serve this worker's groups to their end, answering every step at once."""
    while not (output := scheduler.schedule()).is_empty:
        answer(scheduler, output, 0.0)


def finish_prompts(scheduler: Scheduler) -> None:
    """Serve this worker's groups until they decode."""
    while not scheduler.running or any(group.live[0].num_output_tokens < 2 for group in scheduler.running):
        answer(scheduler, scheduler.schedule(), 0.0)


def warm(scheduler: Scheduler, group: SequenceGroup) -> None:
    """Compute a group, so that its prefix is cached on this worker."""
    others = [member.scheduler for member in scheduler.balancer._members.values() if member.scheduler is not scheduler]
    for other in others:
        other.set_admission(False)
    scheduler.add_request(group)
    finish(scheduler)
    for other in others:
        other.set_admission(True)
