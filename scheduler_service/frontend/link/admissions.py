"""Admissions that the engine has not answered yet: their memory, and the callers that must wait for the answer.

A front end checks a request while the engine decides on its place, so that a request costs one message and one wait. A
flood must not cost checks: for some seconds after a refusal of any kind, the API key's calls wait for their answers
first. A call that is admitted meanwhile changes nothing, because a flood can contain such calls.
"""

import asyncio
import math
import time

import grpc

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.link.message_limits import max_sound_bytes
from scheduler_service.frontend.model import ServedModel

UNREAD_SHARE = 4
MIN_BYTES = 16 << 20
"""Bytes that unanswered admissions may take, or a quarter of unread output's limit if that is more. The engine answers
in milliseconds.
"""
NUM_SOUNDS = 12
"""Four sounds of the largest size: each is counted three times."""
WAIT_SECONDS = 10.0
"""Seconds after a refusal in which the calls of the API key wait for their answers."""


class Admissions:
    """The unanswered admissions of one front end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of the calls whose admission is unanswered."""
        self._refused_at: dict[str, float] = {}  # by the id of the API key

    def must_wait(self, api_key_id: str) -> bool:
        """Whether the engine has refused a call of this API key in the last seconds."""
        return time.monotonic() - self._refused_at.get(api_key_id, -math.inf) < WAIT_SECONDS

    def check_room(self, num_bytes: int, max_unread: int, model: ServedModel | None) -> None:
        """Raises RESOURCE_EXHAUSTED if a call of this size has no room, but never if no other call waits.

        max_unread: the limit on the bytes of unread output. There is no room if the engine is slow or gone.
        """
        limit = max(MIN_BYTES, max_unread // UNREAD_SHARE, NUM_SOUNDS * max_sound_bytes(model))
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def count(self, api_key_id: str, num_bytes: int, answer: asyncio.Future[pb.Answer]) -> None:
        """Count the call's bytes until the answer comes, even if the call is over: its events may still be queued."""
        self.num_bytes += num_bytes

        def answered(found: asyncio.Future[pb.Answer]) -> None:
            self.num_bytes -= num_bytes
            if found.result().code:
                self._refused_at[api_key_id] = time.monotonic()

        answer.add_done_callback(answered)
