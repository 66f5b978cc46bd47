"""Bans, biases and penalties, applied to the logits of many rows at once before a token is chosen.

Except for masks the edits are sparse: a few places of a few rows. Their cost is negligible against one pass over the
vocabulary, so eager torch is fast enough on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.ops import sampling_ops_for


@dataclass(frozen=True)
class LogitEdits:
    """The edits of a matrix of logits, on its device. A place is `row * vocabulary_size + token_id`, int64.

    A place may occur twice in `allowed` and `banned`, in no other field.
    """

    masked: Tensor
    """Rows that `mask` restricts."""
    mask: Tensor
    """[masked rows, bytes] uint8, a bit for each token; see `kernels.sampling.eager.keep`."""
    restricted: Tensor
    """Rows restricted to their places in `allowed`."""
    allowed: Tensor
    """Places."""
    banned: Tensor
    """Places."""
    biased: Tensor
    """Places, to which `biases` are added."""
    biases: Tensor
    """float32, one for each of `biased`."""
    seen: Tensor
    """Places of tokens in the prompt or the output."""
    repetition: Tensor
    """float32, one for each of `seen`: divides a positive logit and multiplies a negative one (Keskar et al., 2019)."""
    subtracted: Tensor
    """float32, one for each of `seen`: presence and frequency penalties, applied after repetition."""


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """Edit in place, in the order of the fields. logits: [rows, vocabulary_size] float32, contiguous."""
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
