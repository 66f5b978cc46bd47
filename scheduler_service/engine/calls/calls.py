"""The engine's record of a client's call: the front end, the memory, and the sequence group after queueing."""

import asyncio
import time
from typing import Any

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceGroup, SequenceOutput, SequenceStatus
from scheduler_service.engine.calls.outbox import Outbox


class Call:
    """One client's call, from its admission until its front end closes it.

    `number` identifies the call in messages with the front end. `first_output` is the number of the call's first
    output. `key` is the request's key, and is empty for calls other than Generate. `api_key_id` is empty if calls need
    no API key.

    Each text of a call with several texts is a `Call` too. The text's `parent` is the call that was admitted.
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
        self.has_texts = False  # whether texts are submitted as separate calls with this parent
        self.adapter_name = ""
        self.adapter_id: str = "" if parent is None else parent.adapter_id
        self.num_bytes = 0  # Server memory.
        self.num_resumed = 0  # Output tokens of an earlier stream, which the request contained.
        self.group: SequenceGroup | None = None
        self.first_output = 0
        self.is_aborted = False  # Whether the request was aborted while it was being checked.
        self.queued_seconds: float | None = None  # From arrival to the first step. None before the first step.
        self.no_worker_timeout: float | None = None  # Maximum wait in seconds. None for the server's default.
        self.expiry: asyncio.TimerHandle | None = None  # Set while no worker takes requests.
        self.told: tuple[bool, int, int] | None = None  # A traced request's `_stands` at the last message.

    def tell(self, **event: Any) -> None:
        self.outbox.tell(self.number, **event)

    def tell_error(self, error: RequestError, *, at_once: bool = False) -> None:
        """End the call's stream with an error. The client reads its unread output first, except if `at_once` is set.

        The request's standing (queueing time, preemptions, worker changes) is sent before the error, because it may
        have changed since the last message.
        """
        if self.group is not None:
            self.tell_standing()
        self.tell(failed=pb.Failed(code=error.code.value[0], message=str(error), at_once=at_once))

    def tell_gained(self, gained: SequenceOutput) -> None:
        """Send a sequence's results of a step: a token, log-probabilities, vectors, or the sequence's end.

        `Requests.publish` sends single tokens without this method. Beam search sends hypotheses at the end only.
        """
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
        """Send the request's standing: queueing time, cached tokens, preemptions and worker changes."""
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
        """Send a traced request's standing if a worker has just admitted, preempted or lost the request."""
        if self._stands() != self.told:
            self.tell_standing()

    def _stands(self) -> tuple[bool, int, int]:
        group = self.group
        assert group is not None
        runs = any(sequence.status is SequenceStatus.RUNNING for sequence in group.sequences)
        return runs, group.history.num_recomputes, group.history.num_swaps
