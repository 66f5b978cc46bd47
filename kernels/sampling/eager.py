"""The operations of the sampler in eager torch, which choose a token from each row of logits. The functions run on
every device, and are the oracle with which tests compare the faster kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.filters import filter_thresholds
from kernels.sampling.log_probabilities import in_small_parts, log_probabilities
from kernels.sampling.noise import gumbel_noise

__all__ = ["Draws", "draw", "greedy", "keep", "log_probabilities"]


@dataclass(frozen=True)
class Draws:
    """Parameters of random draws of tokens from rows of logits. All tensors have the shape [draws], and are on the
    device of the logits.

    The function `filters.filter_thresholds` defines the filters min_p, top_k and top_p.
    """

    rows: Tensor
    """int64: the number of the row of logits from which a token is drawn."""
    keys: Tensor
    """int64: the key of each draw's random numbers, as `noise.row_keys` computes it."""
    temperature: Tensor
    """float32, above 0: the temperature, by which logits are divided."""
    min_p: Tensor
    """float32: the minimum probability of a token, as a fraction of the largest probability."""
    top_k: Tensor
    """int64: the maximum number of tokens that may be drawn; 0 for no limit."""
    top_p: Tensor
    """float32: only the likeliest tokens may be drawn, until their probabilities sum to this number; 1 for all
    tokens."""


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the token with the largest logit in each row, and its logit. Among tokens with equal logits, the token with
    the lowest id is returned.

    logits is [rows, vocabulary_size], of any float type. Returns tokens, [rows] int64, and their logits, [rows], of any
    float type. If a row contains NaN or +inf, or if all its logits are -inf, the returned logit is not finite, and the
    returned token may be any number.
    """
    largest = logits.max(dim=-1)  # NaN counts as the largest; max returns the first of equal logits
    return largest.indices, largest.values


def keep(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Apply masks to rows of logits, in place. If a token's bit in the mask is 0, its logit becomes -inf. The lowest
    bit of a byte belongs to the lowest token id.

    logits is [all rows, vocabulary_size] float32, contiguous. rows is [masks] int64, the row to which each mask
    applies, without duplicates. bits is [masks, at least vocabulary_size / 8] uint8, contiguous.
    """
    each = bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    banned = each.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)


def draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    """Draw tokens that pass the filters at random from the softmax of `logit / temperature`. The draw is computed as
    `argmax(logit / temperature + gumbel)` (Gumbel, 1954).

    logits is [rows, vocabulary_size], of any float type. largest is [rows], the largest logit of each row. Returns the
    drawn tokens, [draws] int64. If the largest logit of a row is not finite, the returned token may be any number.
    """
    parts = zip(*(in_small_parts(part, logits) for part in vars(draws).values()), strict=True)
    return torch.cat([_draw(logits, largest, Draws(*part)) for part in parts])


def _draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    # The largest logit of a row is subtracted before the division. With a tiny temperature, smaller logits then
    # overflow to -inf, and no logit becomes +inf or NaN.
    scaled = logits[draws.rows].float()
    scaled -= largest[draws.rows].float()[:, None]
    scaled /= draws.temperature[:, None]
    thresholds = filter_thresholds(scaled, draws.min_p, draws.top_k, draws.top_p)
    scaled.masked_fill_(scaled < thresholds[:, None], -torch.inf)
    return scaled.add_(gumbel_noise(draws.keys, logits.shape[1])).argmax(dim=-1)
