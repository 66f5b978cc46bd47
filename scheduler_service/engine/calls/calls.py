"""Clients' calls in the engine: the front end, the memory, and once queued the group of each."""

import asyncio
import time
from typing import Any

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceGroup, SequenceOutput, SequenceStatus
from scheduler_service.engine.calls.outbox import Outbox


class Call:
    """One call of a front end, from its admission until it is closed.

    `number` identifies it on the wire, and `first_output` its first output. `key` is empty for calls other than
    Generate. `api_key_id` is empty if calls need no key. Each text of a call of many texts is a call with a `parent`,
    which was admitted for all its texts.
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
        self.has_texts = False  # submitted as calls of their own
        self.adapter_name = ""
        self.adapter_id: str = "" if parent is None else parent.adapter_id
        self.num_bytes = 0  # of the server's memory
        self.num_resumed = 0  # tokens of outputs that came with the request
        self.group: SequenceGroup | None = None
        self.first_output = 0
        self.is_aborted = False  # during the check
        self.queued_seconds: float | None = None  # until a worker took it for the first time
        self.no_worker_timeout: float | None = None  # if shorter than the default
        self.expiry: asyncio.TimerHandle | None = None  # while no worker takes requests
        self.told: tuple[bool, int, int] | None = None  # standing of a traced request, as last sent

    def tell(self, **event: Any) -> None:
        self.outbox.tell(self.number, **event)

    def tell_error(self, error: RequestError, *, at_once: bool = False) -> None:
        """End its stream with an error, after the output that its client has not read yet, or `at_once`.

        The standing is sent first, because the request may have been preempted, or have lost its worker, since it was
        last sent.
        """
        if self.group is not None:
            self.tell_standing()
        self.tell(failed=pb.Failed(code=error.code.value[0], message=str(error), at_once=at_once))

    def tell_gained(self, gained: SequenceOutput) -> None:
        """Send an output's gain, if it is more than a single token."""
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
        """Send the request's standing to its client."""
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
        """Send a traced request's standing if it was admitted or preempted, or lost its worker, since the last send."""
        if self._stands() != self.told:
            self.tell_standing()

    def _stands(self) -> tuple[bool, int, int]:
        group = self.group
        assert group is not None
        runs = any(sequence.status is SequenceStatus.RUNNING for sequence in group.sequences)
        return runs, group.history.num_recomputes, group.history.num_swaps
