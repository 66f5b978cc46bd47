"""Encodes and compares placements: whether a worker took a waiting request or left it to another worker."""

from collections.abc import Callable, Iterable, Sequence

from pagewire.v1 import recording_pb2 as pb
from scheduler_service.core import Placement, SchedulerOutput
from scheduler_service.wire.messages import encode_enum


def encode_placements(output: SchedulerOutput, plan: pb.RecordedPlan, session_of: Callable[[object], int]) -> None:
    """`session_of`: the session number of a scheduler."""
    plan.placements.extend(_encode(output.placements, session_of))
    plan.moved.extend(_encode(output.moved, session_of))
    plan.lacking_adapters.extend(output.lacking_adapters)


def compare_placements(recorded: pb.RecordedPlan, replayed: pb.RecordedPlan) -> str:
    """The first difference in words, or an empty text."""
    for what in ("placements", "moved"):
        ours: Sequence[pb.RecordedPlacement] = getattr(recorded, what)
        theirs: Sequence[pb.RecordedPlacement] = getattr(replayed, what)
        for number in range(max(len(ours), len(theirs))):
            one, other = (side[number] if number < len(side) else None for side in (ours, theirs))
            if one != other:
                return f"{what}, number {number + 1}: recorded {_words(one)}; replayed {_words(other)}"
    if recorded.lacking_adapters != replayed.lacking_adapters:
        return f"adapters that are lacking: recorded {recorded.lacking_adapters}; replayed {replayed.lacking_adapters}"
    return ""


def _encode(placements: Iterable[Placement], session_of: Callable[[object], int]) -> Iterable[pb.RecordedPlacement]:
    for placement in placements:
        yield pb.RecordedPlacement(
            request_id=placement.group.request_id,
            reason=encode_enum(pb.RecordedPlacementReason.DESCRIPTOR, placement.reason),  # type: ignore[arg-type]
            seconds=placement.seconds,
            cached_tokens=placement.cached_tokens,
            num_overtaken=placement.num_overtaken,
            left_to_session=session_of(placement.to) if placement.to is not None else 0,
            seconds_there=placement.seconds_there,
            cached_tokens_there=placement.cached_tokens_there,
        )


def _words(placement: pb.RecordedPlacement | None) -> str:
    if placement is None:
        return "nothing"
    reason = pb.RecordedPlacementReason.Name(placement.reason).removeprefix("RECORDED_PLACEMENT_REASON_").lower()
    where = f"left to session {placement.left_to_session}" if placement.left_to_session else "taken"
    return (
        f"{placement.request_id!r} {where} ({reason}; here {placement.seconds!r} s, {placement.cached_tokens} tokens "
        f"cached; elsewhere {placement.seconds_there!r} s, {placement.cached_tokens_there} tokens cached; overtaken "
        f"{placement.num_overtaken} times)"
    )
