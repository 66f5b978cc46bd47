"""Applies bans, biases and penalties to the logits of many rows, before tokens are chosen.

Except masks, all edits are sparse: they change a few places of a few rows. Sparse edits cost much less than one pass
over the vocabulary, so eager torch is fast enough on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.ops import sampling_ops_for


@dataclass(frozen=True)
class LogitEdits:
    """The edits of a matrix of logits. A place is `row * vocabulary_size + token_id`, int64. All tensors are on the
    logits' device.

    `allowed` and `banned` may contain a place twice. In other fields, places are distinct.
    """

    masked: Tensor
    """int64: the rows to which the rows of `mask` apply."""
    mask: Tensor
    """[masked rows, bytes] uint8: a bit for each token, see `kernels.sampling.eager.keep`."""
    restricted: Tensor
    """int64: rows in which only the tokens in `allowed` may be chosen."""
    allowed: Tensor
    """Places of the tokens that may be chosen in the rows of `restricted`."""
    banned: Tensor
    """Places of tokens that may not be chosen."""
    biased: Tensor
    """Places to which `biases` are added."""
    biases: Tensor
    """float32: for each place in `biased`, the number that is added."""
    seen: Tensor
    """Places of tokens in the prompt or the output."""
    repetition: Tensor
    """float32: for each place in `seen`, the factor that divides a positive logit and multiplies a negative logit
    (Keskar et al., 2019)."""
    subtracted: Tensor
    """float32: for each place in `seen`, the sum of presence and frequency penalties, which is subtracted after
    `repetition` applies."""


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """Apply the edits to logits in place, in the order of the fields. logits: [rows, vocabulary_size] float32,
    contiguous."""
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
