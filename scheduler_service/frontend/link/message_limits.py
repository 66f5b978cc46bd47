"""Limits on a client's message, and on the memory of calls that the engine has not counted yet."""

import contextlib
from collections.abc import Iterator

import grpc

from pagewire_common.calls.errors import RequestError, RequestLimits
from scheduler_service.frontend.model import ServedModel

MIN_REQUEST_BYTES = 1 << 20
MAX_SOUND_BYTES = 16 << 20
BYTES_PER_TOKEN = 12
"""Bytes of a message for each token of the largest prompt. A token id takes at most 3 bytes, a token of text 4 or 5,
and of code up to 10. A MiB takes 3 to 7 ms to parse.
"""

WAITING_SHARE = 4
MIN_WAITING = 16 << 20
"""Bytes that calls waiting for admission may take, or a quarter of unread output's limit if that is more. The engine
answers in milliseconds.
"""
WAITING_SOUNDS = 12
"""Four sounds of the largest size: each is counted three times."""


def request_limits(model: ServedModel | None) -> RequestLimits:
    """Limits of a request's message: room for the model's longest prompts and no more, as parsing blocks the loop."""
    if model is None:
        return RequestLimits(MIN_REQUEST_BYTES, will_grow="until the served model is known; try again later")
    longest = (model.context_length + model.max_encoder_len) * BYTES_PER_TOKEN
    return RequestLimits(max(MIN_REQUEST_BYTES, longest), max_sound_bytes(model))


def max_sound_bytes(model: ServedModel | None) -> int:
    """Further bytes of a message, for a sound, which is not parsed."""
    return MAX_SOUND_BYTES if model is not None and model.feature_bytes else 0


class WaitingCalls:
    """Memory of calls that the engine has not counted yet, because its answer is pending."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextlib.contextmanager
    def place(self, num_bytes: int, most_unread: int, model: ServedModel | None) -> Iterator[None]:
        """Count a call's memory while it waits. `most_unread` is the limit on unread output.

        Raises RESOURCE_EXHAUSTED if there is no room, because the engine is slow or gone; but never for the only call.
        """
        most = max(MIN_WAITING, most_unread // WAITING_SHARE, WAITING_SOUNDS * max_sound_bytes(model))
        if self.num_bytes and self.num_bytes + num_bytes > most:
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
