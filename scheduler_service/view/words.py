"""Decisions of the scheduler and their reasons, in words."""

from collections.abc import Iterable

from scheduler_service.core import AllocStatus, Scheduler, SequenceGroup

MAX_SENTENCES = 24
MAX_NAME = 48
PLACED = {
    "ALONE": "no other worker had room for it",
    "LOAD": "this worker has less work than the others, or is faster",
    "AFFINITY": "this worker has its adapter, or more of its prompt's beginning in the cache",
    "SHARE": "this worker takes its share of the queue",
    "OVERDUE": "it was left to other workers as long or as often as the limits allow",
    "ROOM": "only this worker has room",
    "SUSPECT": "it was in flight in consecutive losses of workers, so it runs alone",
}
"""Reasons why a request is on its worker, by the name of the `PlacementReason`."""
_LEFT = {
    "LOAD": "that worker will be done with it sooner",
    "AFFINITY": "that worker has its adapter, or more of its prompt's beginning in the cache",
    "ROOM": "only that worker has room",
}


def name_of(group: SequenceGroup) -> str:
    """A request's id, shortened: clients choose ids."""
    name = group.request_id
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"


def many(number: int, one: str) -> str:
    """`many(2, "block")` is "2 blocks"."""
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def shortened(sentences: Iterable[str], most: int = MAX_SENTENCES) -> list[str]:
    found = list(sentences)
    return found if len(found) <= most else [*found[: most - 1], f"and {len(found) - most + 1} more decisions"]


def why_left(reason: str) -> str:
    return _LEFT.get(reason, "that worker is better for it")


def why_waits(group: SequenceGroup, schedulers: Iterable[Scheduler]) -> str:
    """Why the first request of the queue waits."""
    reasons = []
    for scheduler in schedulers:
        reason = _why_not_on(group, scheduler)
        if not reason:
            return "the next step admits it, if the step has tokens left"
        reasons.append(reason if not scheduler.worker else f"{scheduler.worker}: {reason}")
    if not reasons:
        return "no worker is connected"
    return "; ".join([*reasons[:3], *([f"and {len(reasons) - 3} more workers"] if len(reasons) > 3 else [])])


def _why_not_on(group: SequenceGroup, scheduler: Scheduler) -> str:
    config, blocks = scheduler.config, scheduler.blocks
    if not scheduler.admits:
        return "it is drained"
    if group.is_suspect and scheduler.running:
        return "the request was in flight in consecutive losses of workers, and waits to run alone"
    if scheduler.swapped:
        return f"swapped requests resume first, of which there are {len(scheduler.swapped)}"
    if scheduler.num_running_seqs + group.num_seqs > config.max_num_seqs:
        return f"{scheduler.num_running_seqs} of at most {config.max_num_seqs} sequences run"
    if group.adapter_id and not scheduler.has_adapter_slot(group):
        return "no slot is free for its adapter"
    match blocks.can_allocate(group, leave_watermark=bool(scheduler.running)):
        case AllocStatus.NEVER:
            return "the request never fits"
        case AllocStatus.LATER:
            needed = blocks.num_blocks_of(group)
            reserve = blocks.num_watermark_blocks if scheduler.running else 0
            kept = f", of which {reserve} are kept for running requests" if reserve else ""
            return f"it needs {many(needed, 'block')} less those cached, and {blocks.device.num_free} are free{kept}"
    if group.placement.left_until is not None:
        return "it is left to a better worker for a short time"
    if scheduler.worker in group.placement.prefix_waits:
        return "another request computes the beginning of its prompt, which it will share"
    return ""
