"""The error message for a client whose output failed."""

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SamplingParams, SequenceStatus

NOTHING_ALLOWED = (
    "sampling.allowed_token_ids, sampling.bad_words, sampling.min_tokens and the tokens that the model's generation "
    "config bans together leave nothing that may come next; allow more tokens, or ban fewer"
)
_FORM_ENDED = (
    "no token could follow: the form that the request asked for, together with its other sampling parameters, leaves "
    "none, or takes too long to follow"
)


def failure(sampling: SamplingParams, status: SequenceStatus | None) -> RequestError | None:
    """The error of an output that ended with `status`; None if the output did not fail.

    The token at which an output fails depends only on the tokens of this output, not on the request's other outputs.
    """
    if status is SequenceStatus.FINISHED_BARRED:
        return RequestError(grpc.StatusCode.INVALID_ARGUMENT, _FORM_ENDED if sampling.form else NOTHING_ALLOWED)
    if status is SequenceStatus.FINISHED_FAILED:
        what = "the model's output was not finite"
        return RequestError(
            grpc.StatusCode.INTERNAL, what if sampling.pooling is not None else f"no token could be chosen: {what}"
        )
    return None
