"""The requests as a page shows them: which fields and block tables have changed since the last look."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_service.core import SequenceGroup
from scheduler_service.core.groups.records import History
from scheduler_service.core.groups.sequence import Sequence as Output
from scheduler_service.view.words import PLACED

NO_TABLES: dict[str, list[int]] = {}
CHANGING = (
    "worker",
    "state",
    "place",
    "reason",
    "cached_tokens",
    "computed_tokens",
    "output_tokens",
    "preemptions",
    "recomputes",
    "moves",
)
"""The fields that change, in the order of the tuples that `changing_fields` returns."""
WORKER, STATE, PLACE, _, _, COMPUTED, OUTPUT, PREEMPTIONS, RECOMPUTES, MOVES = range(len(CHANGING))

Changing = tuple[Any, ...]
AllTables = Sequence[Mapping[int, list[int]]]
"""Block tables by sequence id, for each group of layers."""


class RequestView:
    """One request at the last look."""

    __slots__ = ("changing", "group", "tables")

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.changing: Changing = ()
        self.tables = NO_TABLES

    def first_fields(self, origin: float) -> dict[str, Any]:
        """The fields that never change."""
        group = self.group
        fields: dict[str, Any] = {
            "tenant": group.tenant,
            "priority": group.priority,
            "adapter": group.adapter_id,
            "arrived": round(group.arrived_at - origin, 4),
            "prompt_tokens": group.num_prompt_tokens,
        }
        return fields

    def whole(self, origin: float) -> dict[str, Any]:
        fields = self.first_fields(origin) | dict(zip(CHANGING, self.changing, strict=True))
        if self.tables:
            fields["tables"] = {name: [0, table] for name, table in self.tables.items()}
        return fields

    def has_waited(self, group: SequenceGroup) -> bool:
        """Whether a waiting group has waited since the last look, so that at most its place has changed."""
        if self.group is not group or self.changing[STATE] != "waiting":
            return False
        return self.changing[PREEMPTIONS:] == _returns(group.history)

    def look_at_decode(self, worker: str, tables: AllTables) -> dict[str, Any] | None:
        """The same as `look`, for a running request that decoded at the last look, and has not been preempted since: it
        takes half the time. None if the request is another or does something else."""
        group, before = self.group, self.changing
        outputs, history = group.sequences, group.history
        if (
            before[STATE] != "decode"
            or len(outputs) != 1
            or group.beams is not None
            or group.encoder is not None
            or before[RECOMPUTES] + before[MOVES] != history.num_recomputes
            or before[PREEMPTIONS] != history.num_swaps
            or before[WORKER] != worker
        ):
            return None
        output = outputs[0]
        num_output_tokens = len(output.output_token_ids)
        if output.num_stored_tokens < output.num_prompt_tokens + num_output_tokens - 1:
            return None
        changed: dict[str, Any] = {}
        num_computed = output.num_computed_tokens - output.num_draft_tokens
        if before[COMPUTED] != num_computed or before[OUTPUT] != num_output_tokens:
            changed = {"computed_tokens": num_computed, "output_tokens": num_output_tokens}
            self.changing = (*before[:COMPUTED], num_computed, num_output_tokens, *before[PREEMPTIONS:])
        table = tables[0].get(output.id)
        is_same = len(tables) == 1 and table is not None and self.tables.get("0") == table
        if not is_same and (moves := self._look_at_tables(tables)):
            changed["tables"] = moves
        return changed

    def look(self, changing: Changing, tables: AllTables | None) -> dict[str, Any] | None:
        """Note new values, and return those that changed. `tables`: the tables of the pool that holds the blocks."""
        changed: dict[str, Any] | None = None
        if (before := self.changing) != changing:
            self.changing = changing
            if not before:
                changed = dict(zip(CHANGING, changing, strict=True))
            elif before[:COMPUTED] == changing[:COMPUTED] and before[PREEMPTIONS:] == changing[PREEMPTIONS:]:
                changed = {"computed_tokens": changing[COMPUTED], "output_tokens": changing[COMPUTED + 1]}
            else:
                pairs = zip(CHANGING, before, changing, strict=True)
                changed = {name: new for name, old, new in pairs if old != new}
        if tables is not None or self.tables:
            moves = self._look_at_tables(tables or ())
            if moves:
                changed = changed or {}
                changed["tables"] = moves
        return changed

    def _look_at_tables(self, tables: AllTables) -> dict[str, Any]:
        group, known = self.group, self.tables
        moves: dict[str, Any] = {}
        outputs = group.sequences
        found: dict[str, list[int]] = {}
        for number, by_id in enumerate(tables):
            suffix = f".{number}" if number else ""
            found |= {f"{one.index}{suffix}": by_id[one.id] for one in outputs if one.id in by_id}
            if group.encoder is not None and group.encoder.id in by_id:
                found["encoder"] = by_id[group.encoder.id]
        for name in known.keys() - found.keys():
            moves[name] = (0, [])
        for name, table in found.items():
            if (before := known.get(name, [])) != table:
                start = _first_difference(before, table)
                moves[name] = (start, table[start:])
        if moves:
            self.tables = {name: table[:] for name, table in found.items()}
        return moves


def _first_difference(before: Sequence[int], now: Sequence[int]) -> int:
    length = min(len(before), len(now))
    if before[:length] == now[:length]:
        return length
    return next(index for index in range(length) if before[index] != now[index])


def _leader(group: SequenceGroup) -> Output | None:
    return next((one for one in group.sequences if not one.status.is_finished), None)


def _returns(history: History) -> tuple[int, int, int]:
    """Preemptions by swap and by recompute, and moves: losses and drains of the request's worker."""
    return history.num_swaps, history.num_recomputes - history.num_losses, history.num_losses


def changing_fields(
    group: SequenceGroup, worker: str | None, state: str, place: int | None = None, reason: str = ""
) -> Changing:
    """`state` "running" becomes prefill or decode."""
    outputs, history = group.sequences, group.history
    if len(outputs) == 1 and group.beams is None:
        leader: Output | None = outputs[0]
        num_output_tokens = len(outputs[0].output_token_ids)
    else:
        leader, num_output_tokens = _leader(group), group.num_output_tokens
    num_computed = num_stored = num_tokens = 0
    if leader is not None:
        num_computed = leader.num_computed_tokens - leader.num_draft_tokens
        num_stored = leader.num_stored_tokens
        num_tokens = leader.num_prompt_tokens + len(leader.output_token_ids)
    if state == "running":
        is_decode = num_output_tokens and num_stored >= num_tokens - 1
        state = "decode" if is_decode and (group.encoder is None or not group.waits_for_encoder) else "prefill"
    if worker is not None:
        reason = PLACED.get(group.placement.reason, "")
    return (
        worker,
        state,
        place,
        reason,
        history.num_cached_tokens or 0,
        num_computed,
        num_output_tokens,
        *_returns(history),
    )
