"""Applies masks, bans, biases and penalties to the logits of many rows, before tokens are sampled.

All edits except masks are sparse: they change the logits of a few tokens in a few rows. Sparse edits take much less
time than one pass over the vocabulary, so eager torch is fast enough on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.ops import sampling_ops_for


@dataclass(frozen=True)
class LogitEdits:
    """The edits that are applied to a matrix of logits. A place in the matrix is given as `row * vocabulary_size +
    token_id`, in int64. All tensors are on the device of the logits.

    The fields `allowed` and `banned` may contain a place twice. No other field may contain a place twice.
    """

    masked: Tensor
    """int64: for each row of `mask`, the number of the row of logits to which it applies."""
    mask: Tensor
    """[masked rows, bytes] uint8: masks with a bit for each token, see `kernels.sampling.eager.keep`."""
    restricted: Tensor
    """int64: the numbers of the rows in which only the tokens in `allowed` may be sampled."""
    allowed: Tensor
    """Places of the tokens that may be sampled in the rows that `restricted` lists."""
    banned: Tensor
    """Places of tokens that must not be sampled."""
    biased: Tensor
    """Places of the logits to which `biases` are added."""
    biases: Tensor
    """float32: for each place in `biased`, the number that is added to the logit."""
    seen: Tensor
    """Places of tokens that are in the sequence's prompt or output, to which penalties apply."""
    repetition: Tensor
    """float32: for each place in `seen`, the repetition penalty, which divides a positive logit and multiplies a
    negative logit (Keskar et al., 2019)."""
    subtracted: Tensor
    """float32: for each place in `seen`, the sum of presence and frequency penalties, which is subtracted from the
    logit after `repetition` has been applied."""


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """Apply edits to logits in place, in the order of the fields of `LogitEdits`. logits is [rows, vocabulary_size]
    float32, contiguous."""
    places = logits.view(-1)
    if len(edits.masked):
        sampling_ops_for(logits.device).keep(logits, edits.masked, edits.mask)
    if len(edits.restricted):
        kept = places[edits.allowed]
        logits[edits.restricted] = -torch.inf
        places[edits.allowed] = kept
    if len(edits.banned):
        places[edits.banned] = -torch.inf
    if len(edits.biased):
        places[edits.biased] += edits.biases
    if len(edits.seen):
        before = places[edits.seen]
        repeated = torch.where(before > 0, before / edits.repetition, before * edits.repetition)
        places[edits.seen] = repeated - edits.subtracted
