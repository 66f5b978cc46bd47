"""Admissions that the engine has not answered yet: their memory, and the callers that must wait for the answer.

A front end checks a request while the engine decides on its place, so that a request costs one message and one wait. A
flood must not cost checks: the next calls of a refused API key wait for their answers first, until the engine admits
one of them.
"""

import asyncio

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
_REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], grpc.StatusCode.UNAVAILABLE.value[0])


class Admissions:
    """The unanswered admissions of one front end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of the calls whose admission is unanswered."""
        self._refused: set[str] = set()  # ids of API keys

    def must_wait(self, api_key_id: str) -> bool:
        """Whether the engine refused the last answered call of this API key for lack of room."""
        return api_key_id in self._refused

    def check_room(self, num_bytes: int, max_unread: int, model: ServedModel | None) -> None:
        """Raises RESOURCE_EXHAUSTED if a call of this size has no room, but never if no other call waits.

        max_unread: the limit on the bytes of unread output. There is no room if the engine is slow or gone.
        """
        limit = max(MIN_BYTES, max_unread // UNREAD_SHARE, NUM_SOUNDS * max_sound_bytes(model))
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def count(self, admit: pb.Admit, answer: asyncio.Future[pb.Answer]) -> None:
        """Count the call's bytes until the answer comes, or the call is over."""
        self.num_bytes += admit.num_bytes

        def answered(found: asyncio.Future[pb.Answer]) -> None:
            self.num_bytes -= admit.num_bytes
            code = None if found.cancelled() else found.result().code
            if code in _REFUSED:
                self._refused.add(admit.api_key_id)
            elif code == 0:
                self._refused.discard(admit.api_key_id)

        answer.add_done_callback(answered)
