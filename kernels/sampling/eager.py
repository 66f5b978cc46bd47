"""The operations of the sampler in eager torch, for every device, and the oracle of the tests."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.filters import filter_thresholds
from kernels.sampling.log_probabilities import in_small_parts, log_probabilities
from kernels.sampling.noise import gumbel_noise

__all__ = ["Draws", "draw", "greedy", "keep", "log_probabilities"]


@dataclass(frozen=True)
class Draws:
    """Random draws from rows of logits. Tensors are [draws], on the logits' device. Filters: see
    `filter_thresholds`."""

    rows: Tensor
    """int64: row of logits."""
    keys: Tensor
    """int64: from `noise.row_keys`."""
    temperature: Tensor
    """float32, above 0: divides logits."""
    min_p: Tensor
    """float32: minimum probability, as a fraction of the largest."""
    top_k: Tensor
    """int64; 0 for no limit."""
    top_p: Tensor
    """float32: the likeliest tokens up to this sum of probabilities; 1 for all."""


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and its token; among equals the lowest id. logits: [rows, vocabulary_size], any
    float type. Returns tokens [rows] int64 and logits [rows]. With NaN, +inf or nothing but -inf, the logit is not
    finite and the token is arbitrary."""
    largest = logits.max(dim=-1)  # NaN counts as the largest; max returns the first of equals
    return largest.indices, largest.values


def keep(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set logits to -inf in place where the mask's bit is 0; the lowest bit of a byte is the lowest token id. logits:
    [all rows, vocabulary_size] float32, contiguous. rows: [masks] int64, distinct. bits: [masks, at least
    vocabulary_size / 8] uint8, contiguous."""
    each = bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    banned = each.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)


def draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    """Draw from the filtered softmax of `logit / temperature`, as `argmax(logit / temperature + gumbel)` (Gumbel,
    1954). logits: [rows, vocabulary_size], any float type. largest: [rows]; if not finite, the token is arbitrary.
    Returns [draws] int64."""
    parts = zip(*(in_small_parts(part, logits) for part in vars(draws).values()), strict=True)
    return torch.cat([_draw(logits, largest, Draws(*part)) for part in parts])


def _draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    # After the largest is subtracted, a tiny temperature makes smaller logits -inf, and none +inf or NaN.
    scaled = logits[draws.rows].float()
    scaled -= largest[draws.rows].float()[:, None]
    scaled /= draws.temperature[:, None]
    thresholds = filter_thresholds(scaled, draws.min_p, draws.top_k, draws.top_p)
    scaled.masked_fill_(scaled < thresholds[:, None], -torch.inf)
    return scaled.add_(gumbel_noise(draws.keys, logits.shape[1])).argmax(dim=-1)
