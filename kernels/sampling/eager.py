"""Choice of a token from each row of logits, in eager torch: it runs on every device, and is the oracle of faster
kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.filters import filter_thresholds
from kernels.sampling.log_probabilities import in_small_parts, log_probabilities
from kernels.sampling.noise import gumbel_noise

__all__ = ["Draws", "draw", "greedy", "keep", "log_probabilities"]


@dataclass(frozen=True)
class Draws:
    """The rows of a matrix of logits that draw their token, and their parameters. All tensors are [draws], on the
    logits' device.

    `filters.filter_thresholds` defines the filters.
    """

    rows: Tensor
    """int64."""
    keys: Tensor
    """int64, from `noise.row_keys`."""
    temperature: Tensor
    """float32, above 0."""
    min_p: Tensor
    """float32."""
    top_k: Tensor
    """int64, 0 for any number."""
    top_p: Tensor
    """float32."""


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The token with the largest logit of each row (the lowest id among equals), and that logit.

    logits: [rows, vocabulary_size], any float type. Returns [rows] int64 and [rows], any float type. If a logit of the
    row is NaN or +inf, or all are -inf, the returned logit is not finite, and the token may be any number.
    """
    largest = logits.max(dim=-1)  # NaN counts as largest; the first of equals wins
    return largest.indices, largest.values


def keep(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Ban all tokens of these rows except those whose bit is 1, the lowest bit of a byte first. In place.

    logits: [rows of all, vocabulary_size] float32, contiguous; rows: [masks] int64, each once; bits: [masks, at least
    vocabulary_size / 8] uint8, contiguous.
    """
    each = bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    banned = each.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)


def draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    """Draw from the softmax of `logit / temperature` over the tokens that pass the filters, as `argmax(logit / t +
    gumbel)`.

    logits: [rows, vocabulary_size], any float type; largest: [rows], their maxima; returns [draws] int64. A draw from a
    row whose maximum is not finite may be any number. (Gumbel, 1954.)
    """
    parts = zip(*(in_small_parts(part, logits) for part in vars(draws).values()), strict=True)
    return torch.cat([_draw(logits, largest, Draws(*part)) for part in parts])


def _draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    # The largest logit is shifted to 0 first. With a tiny temperature all others then overflow to -inf, and none to
    # +inf or NaN.
    scaled = logits[draws.rows].float()
    scaled -= largest[draws.rows].float()[:, None]
    scaled /= draws.temperature[:, None]
    thresholds = filter_thresholds(scaled, draws.min_p, draws.top_k, draws.top_p)
    scaled.masked_fill_(scaled < thresholds[:, None], -torch.inf)
    return scaled.add_(gumbel_noise(draws.keys, logits.shape[1])).argmax(dim=-1)
