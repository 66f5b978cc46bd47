"""A client's call in the engine."""

import asyncio
import time
from typing import Any

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceGroup, SequenceOutput, SequenceStatus
from scheduler_service.engine.calls.outbox import Outbox


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
