"""Limits on the size of a client's message."""

from pagewire_common.calls.errors import RequestLimits
from scheduler_service.frontend.model import ServedModel

MIN_REQUEST_BYTES = 1 << 20
MAX_SOUND_BYTES = 16 << 20
BYTES_PER_TOKEN = 12
"""Bytes of a message for each token of the largest prompt. A token id takes at most 3 bytes, a token of text 4 or 5,
and of code up to 10. A MiB takes 3 to 7 ms to parse.
"""


def request_limits(model: ServedModel | None) -> RequestLimits:
    """Limits of a request's message: room for the model's longest prompts and no more, as parsing blocks the loop."""
    if model is None:
        return RequestLimits(MIN_REQUEST_BYTES, will_grow="until the served model is known; try again later")
    longest = (model.context_length + model.max_encoder_len) * BYTES_PER_TOKEN
    return RequestLimits(max(MIN_REQUEST_BYTES, longest), max_sound_bytes(model))


def max_sound_bytes(model: ServedModel | None) -> int:
    """Further bytes of a message, for a sound, which is not parsed."""
    return MAX_SOUND_BYTES if model is not None and model.feature_bytes else 0
