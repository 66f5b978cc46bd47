"""Converts min_p, top_k and top_p to a threshold for each row of logits. Filters apply in this order, each to the
tokens kept so far. Equal logits are kept or dropped together."""

import torch
from torch import Tensor

_CANDIDATES = 1024
"""Largest logits among which a threshold is searched first, because sorting 49,152 logits takes milliseconds."""


def filter_thresholds(scaled: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest scaled logit that passes, [rows]. scaled: [rows, vocabulary_size] float32, `(logit - largest) /
    temperature`. min_p, top_p: [rows] float32. top_k: [rows] int64, 0 for no limit. Sources: Fan et al. (2018) top_k,
    Holtzman et al. (2019) top_p, Nguyen et al. (2024) min_p."""
    thresholds = min_p.log()
    rows = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    vocabulary_size = scaled.shape[1]
    width = min(_CANDIDATES, vocabulary_size)
    while len(rows):
        subset = scaled[rows]
        ranks = top_k[rows]
        found, complete = _top_k_top_p(
            subset,
            subset.topk(width).values,
            thresholds[rows],
            ranks.masked_fill(ranks == 0, vocabulary_size).clamp(max=vocabulary_size),
            top_p[rows],
        )
        thresholds[rows] = torch.where(complete, found, thresholds[rows])
        rows = rows[~complete]
        width = vocabulary_size
    return thresholds


def _top_k_top_p(
    scaled: Tensor, candidates: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Raise thresholds by top_k, then by top_p over the remaining tokens. scaled: [rows, vocabulary_size]. candidates:
    [rows, width], largest first. floor: [rows], by min_p. top_k, top_p: [rows]. Returns thresholds [rows], and whether
    each is among the candidates, [rows] bool."""
    width = candidates.shape[1]
    by_rank = candidates.gather(1, (top_k.clamp(max=width) - 1)[:, None]).squeeze(1)
    limits_rank = top_k < scaled.shape[1]
    floor = torch.where(limits_rank, torch.maximum(floor, by_rank), floor)
    complete = ~limits_rank | (top_k <= width)

    mass = scaled.exp().masked_fill(scaled < floor[:, None], 0).sum(-1)
    weights = candidates.exp().masked_fill(candidates < floor[:, None], 0)
    cumulative = weights.cumsum(-1)
    # A token passes if all likelier ones sum to less than top_p; the likeliest always passes.
    in_nucleus = (cumulative - weights < (top_p * mass)[:, None]) & (weights > 0)
    by_mass = candidates.gather(1, in_nucleus.sum(-1, keepdim=True).clamp(min=1) - 1).squeeze(1)
    limits_mass = top_p < 1
    threshold = torch.where(limits_mass, torch.maximum(floor, by_mass), floor)
    complete &= ~limits_mass | (cumulative[:, -1] >= top_p * mass) | (width == scaled.shape[1])
    return threshold, complete
