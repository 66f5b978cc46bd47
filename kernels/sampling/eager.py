"""Chooses a token from each row of logits, in eager torch. The functions run on every device, and are the oracle with
which tests compare the faster kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.filters import filter_thresholds
from kernels.sampling.log_probabilities import in_small_parts, log_probabilities
from kernels.sampling.noise import gumbel_noise

__all__ = ["Draws", "draw", "greedy", "keep", "log_probabilities"]


@dataclass(frozen=True)
class Draws:
    """Parameters of random draws from rows of logits. All tensors are [draws], on the logits' device.

    `filters.filter_thresholds` defines the filters.
    """

    rows: Tensor
    """int64: the row of logits of each draw."""
    keys: Tensor
    """int64: the key of each draw's random numbers, from `noise.row_keys`."""
    temperature: Tensor
    """float32, above 0: divides the logits."""
    min_p: Tensor
    """float32: minimum probability, as a fraction of the largest probability."""
    top_k: Tensor
    """int64: maximum number of tokens, 0 for no limit."""
    top_p: Tensor
    """float32: only the likeliest tokens pass, until their probabilities sum to this number; 1 for all tokens."""


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The token with the largest logit of each row, and the logit. Among tokens with equal logits, the lowest id is
    returned.

    logits: [rows, vocabulary_size], any float type. Returns tokens, [rows] int64, and logits, [rows], any float type.
    If a row contains NaN or +inf, or if all its logits are -inf, the returned logit is not finite, and the token may be
    any number.
    """
    largest = logits.max(dim=-1)  # NaN counts as the largest; among equal logits, the first is returned
    return largest.indices, largest.values


def keep(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Apply masks to rows of logits, in place. A token is banned if its bit is 0. The lowest bit of a byte belongs to
    the lowest token id.

    logits: [all rows, vocabulary_size] float32, contiguous; rows: [masks] int64, distinct; bits: [masks, at least
    vocabulary_size / 8] uint8, contiguous.
    """
    each = bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    banned = each.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)


def draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    """Draw tokens that pass the filters from the softmax of `logit / temperature`, computed as `argmax(logit /
    temperature + gumbel)`.

    logits: [rows, vocabulary_size], any float type; largest: [rows], the maximum of each row. Returns [draws] int64. If
    the maximum of a row is not finite, the returned token may be any number. (Gumbel, 1954.)
    """
    parts = zip(*(in_small_parts(part, logits) for part in vars(draws).values()), strict=True)
    return torch.cat([_draw(logits, largest, Draws(*part)) for part in parts])


def _draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    # The largest logit is shifted to 0 first. With a tiny temperature, all smaller logits then overflow to -inf, so no
    # result is +inf or NaN.
    scaled = logits[draws.rows].float()
    scaled -= largest[draws.rows].float()[:, None]
    scaled /= draws.temperature[:, None]
    thresholds = filter_thresholds(scaled, draws.min_p, draws.top_k, draws.top_p)
    scaled.masked_fill_(scaled < thresholds[:, None], -torch.inf)
    return scaled.add_(gumbel_noise(draws.keys, logits.shape[1])).argmax(dim=-1)
