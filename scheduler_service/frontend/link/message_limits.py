"""Limits on the size of gRPC messages from clients."""

from pagewire_common.calls.errors import RequestLimits
from scheduler_service.frontend.model import ServedModel

MIN_REQUEST_BYTES = 1 << 20
MAX_SOUND_BYTES = 16 << 20
BYTES_PER_TOKEN = 12
"""A message may have this number of bytes for each token of the model's longest prompt. A token id takes at most 3
bytes. As text, a token takes 4 or 5 bytes in prose, and up to 10 bytes in program code. Parsing a message takes 3 to 7
ms a MiB.
"""


def request_limits(model: ServedModel | None) -> RequestLimits:
    """Limits on the size of a message with a request, into which the model's longest prompt fits.

    Larger messages are refused, because parsing a message blocks the event loop.
    """
    if model is None:
        return RequestLimits(MIN_REQUEST_BYTES, will_grow="until the served model is known; try again later")
    longest = (model.context_length + model.max_encoder_len) * BYTES_PER_TOKEN
    return RequestLimits(max(MIN_REQUEST_BYTES, longest), max_sound_bytes(model))


def max_sound_bytes(model: ServedModel | None) -> int:
    """Largest number of bytes of a sound.

    The sound does not count towards the limit for the rest of its message, because sounds are not parsed.
    """
    return MAX_SOUND_BYTES if model is not None and model.feature_bytes else 0
