"""Applies masks, bans, biases and penalties to logits before sampling. All edits but masks change few tokens of few
rows, so eager torch is fast enough on every device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.ops import sampling_ops_for


@dataclass(frozen=True)
class LogitEdits:
    """Edits of a matrix of logits, on its device. A place is `row * vocabulary_size + token_id`, int64. Only `allowed`
    and `banned` may contain a place twice."""

    masked: Tensor
    """int64: row of logits for each row of `mask`."""
    mask: Tensor
    """[masked rows, bytes] uint8: a bit for each token, see `keep`."""
    restricted: Tensor
    """int64: rows that may sample `allowed` tokens only."""
    allowed: Tensor
    """Places in the rows of `restricted`."""
    banned: Tensor
    """Places that must not be sampled."""
    biased: Tensor
    """Places to which `biases` are added."""
    biases: Tensor
    """float32, for each of `biased`."""
    seen: Tensor
    """Places of tokens in the prompt or output, for penalties."""
    repetition: Tensor
    """float32, for each of `seen`: divides positive and multiplies negative logits (Keskar et al., 2019)."""
    subtracted: Tensor
    """float32, for each of `seen`: presence plus frequency penalties, subtracted after `repetition`."""


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """Edit logits in place, in the order of the fields. logits: [rows, vocabulary_size] float32, contiguous."""
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
