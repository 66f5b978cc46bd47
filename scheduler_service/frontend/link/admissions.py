"""Limits on calls before the engine has admitted them: message sizes, memory of unanswered admissions, and patience.

A front end checks a request while the engine decides on its admission. In a flood of refused calls such checks are
wasted, so calls of an API key wait for the answer first for some seconds after a refusal.
"""

import asyncio
import math
import time
from contextvars import ContextVar

import grpc

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError, RequestLimits
from scheduler_service.frontend.model import ServedModel

MIN_REQUEST_BYTES = 1 << 20
MAX_SOUND_BYTES = 16 << 20
BYTES_PER_TOKEN = 12
"""Message bytes allowed for each token of the longest prompt. A token id takes at most 3 bytes; a token of prose 4 to
5, of program code up to 10. Parsing takes 3 to 7 ms a MiB.
"""
UNREAD_SHARE = 4
MIN_BYTES = 16 << 20
"""Limit on the bytes of unanswered admissions, or a quarter of the limit on unread output if the quarter is larger."""
NUM_SOUNDS = 12
"""Limit on unanswered admissions, in sounds of the largest size. A sound is counted three times, so four fit."""
WAIT_SECONDS = 10.0
"""Seconds after a refusal in which the calls of the API key wait for their answers."""
PATIENCE_HEADER = "pagewire-no-worker-timeout"
patience: ContextVar[float] = ContextVar("patience", default=math.inf)
"""Seconds that the current call may wait for a worker, if below the server's --no-worker-timeout."""


def request_limits(model: ServedModel | None) -> RequestLimits:
    """Limits on a message: the model's longest prompt fits, and parsing does not block the event loop for long."""
    if model is None:
        return RequestLimits(MIN_REQUEST_BYTES, will_grow="until the served model is known; try again later")
    longest = (model.context_length + model.max_encoder_len) * BYTES_PER_TOKEN
    return RequestLimits(max(MIN_REQUEST_BYTES, longest), _max_sound_bytes(model))


def _max_sound_bytes(model: ServedModel | None) -> int:
    """Largest bytes of a sound, which has a limit of its own because sounds are not parsed."""
    return MAX_SOUND_BYTES if model is not None and model.feature_bytes else 0


def note_patience(details: grpc.HandlerCallDetails) -> None:
    """Set `patience` from a call's metadata. Raises INVALID_ARGUMENT for a malformed value."""
    for name, value in details.invocation_metadata or ():
        if name != PATIENCE_HEADER:
            continue
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            reason = f"metadata {PATIENCE_HEADER} is {str(value)[:40]!r}; it must be a number of seconds, 0 or more"
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, reason)
        patience.set(seconds)


class Admissions:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._refused_at: dict[str, float] = {}  # by the id of the API key

    def must_wait(self, api_key_id: str) -> bool:
        return time.monotonic() - self._refused_at.get(api_key_id, -math.inf) < WAIT_SECONDS

    def check_room(self, num_bytes: int, max_unread: int, model: ServedModel | None) -> None:
        """Raise RESOURCE_EXHAUSTED if the unanswered admissions and this call have too many bytes, unless this call is
        alone.

        `max_unread`: limit on the bytes of unread output.
        """
        limit = max(MIN_BYTES, max_unread // UNREAD_SHARE, NUM_SOUNDS * _max_sound_bytes(model))
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def count(self, api_key_id: str, num_bytes: int, answer: asyncio.Future[pb.Answer]) -> None:
        self.num_bytes += num_bytes

        def answered(found: asyncio.Future[pb.Answer]) -> None:
            self.num_bytes -= num_bytes
            if found.result().code:
                self._refused_at[api_key_id] = time.monotonic()

        answer.add_done_callback(answered)
