"""A client's call in the engine, and the engine's messages to one front end.

Tokens are rows of output number and token id. Other output is an event, with the number of rows before it. Rows and
events that arrive during a write share the next message, whose fixed cost is that of 100 rows.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1 import scheduler_output_pb2 as wire
from pagewire.v1 import sequence_group_pb2
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceGroup, SequenceOutput, SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.wire.messages import encode_enum

MAX_ROWS = 512
MAX_LOGPROBS = 1 << 13
EVENT_WEIGHT = 8
"""Weight in rows or log-probabilities. MAX_ROWS and MAX_LOGPROBS keep a message below 0.1 MiB, 5 ms of a front end's
time.
"""
MAX_VECTOR_BYTES = 1 << 18
"""Bytes of vectors in one event, unless a single vector is larger."""
ROW_BYTES = 72
"""Memory of a queued row or log-probability."""
MAX_WAITING = 1 << 14
STUCK_SECONDS = 0.1
"""Seconds without a read after which answers are processed although more than MAX_WAITING rows wait."""


class _Bulk(NamedTuple):
    """Large fields, encoded only when the event is put into a message."""

    sampled: Sequence[TokenLogprobs] = ()
    prompt: Sequence[TokenLogprobs] = ()
    vectors: bytes | memoryview = b""

    @property
    def weight(self) -> int:
        logprobs = (positions for positions in (self.sampled, self.prompt) if positions)
        number = sum(len(positions) * len(positions[0].token_ids) for positions in logprobs)
        return number + len(self.vectors) // ROW_BYTES


_NONE = _Bulk()


class Outbox:
    __slots__ = (
        "_events",
        "_events_weight",
        "_is_stuck",
        "_most_weight",
        "_num_taken",
        "_taken",
        "has_some",
        "is_overfull",
        "outputs",
        "token_ids",
    )

    def __init__(self, most_bytes: int = 1 << 26) -> None:
        """`most_bytes`: memory above which the front end counts as stopped."""
        self.has_some = asyncio.Event()
        """Set if the queue is not empty, also by code that appends to `outputs`."""
        self.is_overfull = asyncio.Event()
        self._most_weight = most_bytes // ROW_BYTES
        self.outputs: list[int] = []
        self.token_ids: list[int] = []
        self._events: deque[tuple[int, pb.EngineEvent, _Bulk]] = deque()  # rows before the event, event, large fields
        self._events_weight = 0
        self._num_taken = 0  # rows in earlier messages
        self._taken = asyncio.Event()
        self._is_stuck = False

    def __len__(self) -> int:
        return len(self.outputs) + len(self._events)

    def tell(self, call: int, **event: Any) -> None:
        """The keyword is the event's field in `EngineEvent`."""
        self._append(pb.EngineEvent(call=call, **event))
        self.has_some.set()

    def tell_gained(self, call: int, gained: SequenceOutput) -> None:
        """Append a step's results for an output, as several events if large."""
        event, positions = _encode_gained(call, gained), gained.prompt_logprobs or []
        if gained.vectors:
            self._tell_vectors(event, gained)
            return
        at_once = max(1, MAX_LOGPROBS // len(positions[0].token_ids)) if positions else 1
        start = 0
        while len(positions) - start > at_once:
            part = pb.OutputGained(index=gained.sequence.index, prompt_start=gained.prompt_start + start)
            self._append(pb.EngineEvent(call=call, gained=part), _Bulk(prompt=positions[start : start + at_once]))
            start += at_once
        event.gained.prompt_start = gained.prompt_start + start
        self._append(event, _Bulk([gained.logprobs] if gained.logprobs else [], positions[start:]))
        self.has_some.set()

    def _tell_vectors(self, last: pb.EngineEvent, gained: SequenceOutput) -> None:
        pooling, vectors, start = gained.sequence.sampling.pooling, memoryview(gained.vectors), gained.prompt_start
        assert pooling is not None
        at_once = max(1, MAX_VECTOR_BYTES // pooling.vector_bytes)
        num_bytes = at_once * pooling.vector_bytes
        while len(vectors) > num_bytes:
            part = pb.OutputGained(index=gained.sequence.index, prompt_start=start)
            self._append(pb.EngineEvent(call=last.call, gained=part), _Bulk(vectors=vectors[:num_bytes]))
            vectors, start = vectors[num_bytes:], start + at_once
        last.gained.prompt_start = start
        self._append(last, _Bulk(vectors=vectors))
        self.has_some.set()

    def _append(self, event: pb.EngineEvent, bulk: _Bulk = _NONE) -> None:
        self._events.append((self._num_taken + len(self.outputs), event, bulk))
        self._events_weight += EVENT_WEIGHT + bulk.weight

    @property
    def _weight(self) -> int:
        return len(self.outputs) + self._events_weight

    @property
    def has_room(self) -> bool:
        return self._weight <= MAX_WAITING

    async def room(self) -> None:
        """Wait until the queue has room, or the front end reads nothing for STUCK_SECONDS."""
        if self._weight > self._most_weight:
            self.is_overfull.set()
        while not self.has_room and not self._is_stuck:
            self._taken.clear()
            try:
                await asyncio.wait_for(self._taken.wait(), STUCK_SECONDS)
            except TimeoutError:
                self._is_stuck = True

    def take(self) -> pb.AttachResponse:
        """The next message; empty if the queue is empty."""
        self._taken.set()
        self._is_stuck = False
        message, num_rows, left = pb.AttachResponse(), min(MAX_ROWS, len(self.outputs)), MAX_LOGPROBS
        while self._events and (row := self._events[0][0] - self._num_taken) <= num_rows:
            _, event, bulk = self._events[0]
            weight = EVENT_WEIGHT + bulk.weight
            left -= weight
            if left < 0 and message.events:
                num_rows = row
                break
            self._events.popleft()
            self._events_weight -= weight
            event.row = row
            if bulk is not _NONE:
                _fill_logprobs(event.gained.logprobs, bulk.sampled)
                _fill_logprobs(event.gained.prompt_logprobs, bulk.prompt)
                event.gained.vectors = bytes(bulk.vectors)
            message.events.append(event)
        message.outputs.extend(self.outputs[:num_rows])
        message.token_ids.extend(self.token_ids[:num_rows])
        del self.outputs[:num_rows], self.token_ids[:num_rows]
        self._num_taken += num_rows
        if not len(self):
            self.has_some.clear()
        return message


def _encode_gained(call: int, gained: SequenceOutput) -> pb.EngineEvent:
    """The status is encoded now: the sequence may end before the message is sent."""
    sequence, status = gained.sequence, gained.sequence.status
    event = pb.EngineEvent(call=call)
    message = event.gained
    message.index = sequence.index
    if gained.token_id is not None:
        message.token_id = gained.token_id
    if status.is_finished and not gained.goes_on:
        message.status = encode_enum(sequence_group_pb2.SequenceStatus.DESCRIPTOR, status)  # type: ignore[assignment]
        if sequence.stop_token_id is not None:
            message.stop_token_id = sequence.stop_token_id
    return event


def _fill_logprobs(message: wire.SampleLogprobs, positions: Sequence[TokenLogprobs]) -> None:
    if positions:
        message.width = len(positions[0].token_ids)
        message.ranks.extend(position.rank for position in positions)
        for position in positions:
            message.token_ids.extend(position.token_ids)
            message.logprobs.extend(position.logprobs)


class Call:
    """One call, from its admission until its front end closes it.

    `key` is empty for calls other than Generate. Each text of a call with several texts has that call as `parent`.
    """

    __slots__ = (
        "adapter_id",
        "adapter_name",
        "api_key_id",
        "expiry",
        "first_output",
        "group",
        "has_texts",
        "is_aborted",
        "is_restored",
        "key",
        "no_worker_timeout",
        "num_bytes",
        "num_resumed",
        "number",
        "outbox",
        "parent",
        "queued_seconds",
        "told",
    )

    def __init__(
        self, outbox: Outbox, number: int, key: str, api_key_id: str = "", *, parent: "Call | None" = None
    ) -> None:
        self.outbox = outbox
        self.number = number
        self.key = key
        self.api_key_id: str = api_key_id if parent is None else parent.api_key_id
        self.parent = parent
        self.has_texts = False  # whether its texts are calls of their own
        self.adapter_name = ""
        self.adapter_id: str = "" if parent is None else parent.adapter_id
        self.num_bytes = 0
        self.num_resumed = 0  # output tokens of an earlier stream
        self.group: SequenceGroup | None = None
        self.first_output = 0
        self.is_restored: bool = parent is not None and parent.is_restored  # admitted by an engine that has ended
        self.is_aborted = False  # aborted while being checked
        self.queued_seconds: float | None = None  # from arrival to the first step
        self.no_worker_timeout: float | None = None  # None: the server's default
        self.expiry: asyncio.TimerHandle | None = None  # in an outage
        self.told: tuple[bool, int, int] | None = None  # `_stands` of a traced request at the last message

    def tell(self, **event: Any) -> None:
        self.outbox.tell(self.number, **event)

    def tell_error(self, error: RequestError, *, at_once: bool = False) -> None:
        """The client reads its unread output first, except if `at_once` is set."""
        if self.group is not None:
            self.tell_standing()
        self.tell(failed=pb.Failed(code=error.code.value[0], message=str(error), at_once=at_once))

    def tell_gained(self, gained: SequenceOutput) -> None:
        """Send a step's results of a sequence; beams have results only at the end."""
        group = gained.sequence.group
        if group.beams is None or gained.sequence.status.has_failed:
            self.outbox.tell_gained(self.number, gained)
        elif group.is_finished:
            found = [
                pb.Hypothesis(token_ids=h.token_ids, is_stopped=h.is_stopped, stop_token_id=h.stop_token_id)
                for h in group.beams.hypotheses
            ]
            self.tell(hypotheses=pb.Hypotheses(hypotheses=found))

    def tell_standing(self) -> None:
        group = self.group
        assert group is not None
        standing = pb.Standing(
            queued_seconds=self.queued_seconds,
            cached_tokens=group.history.num_cached_tokens or 0,
            num_recomputes=group.history.num_recomputes,
            num_swaps=group.history.num_swaps,
            num_worker_changes=group.history.num_worker_changes,
        )
        if group.trace_parent:
            self.told = self._stands()
            place = standing.place
            place.at, place.runs, place.worker = time.monotonic(), self.told[0], group.history.worker or ""
        self.tell(standing=standing)

    def tell_change(self) -> None:
        """Send a traced request's standing if a worker has admitted, preempted or lost the request."""
        if self._stands() != self.told:
            self.tell_standing()

    def _stands(self) -> tuple[bool, int, int]:
        group = self.group
        assert group is not None
        runs = any(sequence.status is SequenceStatus.RUNNING for sequence in group.sequences)
        return runs, group.history.num_recomputes, group.history.num_swaps
