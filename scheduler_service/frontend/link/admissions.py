"""Counts the memory of unanswered admissions, and decides which calls wait for the engine's answer.

A front end checks a request while the engine decides whether to admit it. So a request costs one message and one wait.
In a flood of calls, checks of refused calls would be wasted work. For some seconds after a refusal, all calls of the
API key therefore wait for the engine's answer before their check. An admitted call does not end these seconds, because
a flood can contain admitted calls.
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
"""Limit on the bytes of unanswered admissions, or a quarter of the limit on unread output if the quarter is larger.

The engine answers in milliseconds.
"""
NUM_SOUNDS = 12
"""Limit on unanswered admissions, in audio inputs of the largest size. Each input is counted three times, so four
inputs fit.
"""
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
        """Raise RESOURCE_EXHAUSTED if the unanswered admissions and this call exceed the limit on bytes.

        A call is never refused if no other call awaits an answer. The limit is reached if the engine is slow or gone.
        max_unread: the limit on the bytes of unread output.
        """
        limit = max(MIN_BYTES, max_unread // UNREAD_SHARE, NUM_SOUNDS * max_sound_bytes(model))
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def count(self, api_key_id: str, num_bytes: int, answer: asyncio.Future[pb.Answer]) -> None:
        """Count the call's bytes until the engine answers. Events of a call that has ended may still be queued."""
        self.num_bytes += num_bytes

        def answered(found: asyncio.Future[pb.Answer]) -> None:
            self.num_bytes -= num_bytes
            if found.result().code:
                self._refused_at[api_key_id] = time.monotonic()

        answer.add_done_callback(answered)
