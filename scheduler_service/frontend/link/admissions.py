"""Counts the memory of unanswered admissions, and decides which calls wait for the engine's answer.

A front end checks a request while the engine decides whether to admit it. So a request costs one message and one wait.
In a flood of calls, checks of refused calls would be wasted work. After the engine has refused a call of an API key,
the key's next calls wait for the answer before their check, until the engine admits a call of the key.
"""

import asyncio

import grpc

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.link.message_limits import max_sound_bytes
from scheduler_service.frontend.model import ServedModel

UNREAD_SHARE = 4
MIN_BYTES = 16 << 20
"""Limit on the bytes of unanswered admissions, or a quarter of the limit on unread output if the quarter is larger.

The engine answers in milliseconds.
"""
NUM_SOUNDS = 12
"""Limit on unanswered admissions, in audio inputs (sounds) of the largest size. Each sound is counted three times, so
four sounds fit.
"""
_REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], grpc.StatusCode.UNAVAILABLE.value[0])


class Admissions:
    """The unanswered admissions of one front end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of the calls whose admission is unanswered."""
        self._refused: set[str] = set()  # ids of API keys whose last answered call was refused

    def must_wait(self, api_key_id: str) -> bool:
        """Whether the engine refused the last answered call of this API key for lack of room."""
        return api_key_id in self._refused

    def check_room(self, num_bytes: int, max_unread: int, model: ServedModel | None) -> None:
        """Raise RESOURCE_EXHAUSTED if the unanswered admissions and this call exceed the limit on bytes.

        A call is never refused if no other call awaits an answer. The limit is reached if the engine is slow or gone.
        max_unread: the limit on the bytes of unread output.
        """
        limit = max(MIN_BYTES, max_unread // UNREAD_SHARE, NUM_SOUNDS * max_sound_bytes(model))
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def count(self, admit: pb.Admit, answer: asyncio.Future[pb.Answer]) -> None:
        """Count the call's bytes until the engine answers or the call ends."""
        self.num_bytes += admit.num_bytes

        def answered(found: asyncio.Future[pb.Answer]) -> None:
            self.num_bytes -= admit.num_bytes
            code = None if found.cancelled() else found.result().code
            if code in _REFUSED:
                self._refused.add(admit.api_key_id)
            elif code == 0:
                self._refused.discard(admit.api_key_id)

        answer.add_done_callback(answered)
