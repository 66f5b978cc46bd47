"""A mixture of experts in eager torch. Batch-invariant, although an expert's rows depend on the batch: a row's product
is summed in the same order for any number of rows, and outputs are added in the order of the token's experts."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kernels.float8 import Float8Weight, product_in_16_bits
from kernels.ops import ExpertRows, Product

_TILE_ROWS = 16
"""Rows of a product of `pack_batch_invariant`. BLAS sums by number of rows (MKL: 3 and 4 rows differ), not by place."""


@dataclass(frozen=True)
class Routing:
    """DeepSeek's choice of experts (DeepSeek-AI, 2024). Raises ValueError if the groups do not fit the experts."""

    num_experts: int
    num_chosen: int
    """Experts for each token."""
    is_sigmoid: bool
    """Whether a sigmoid turns logits into scores, as in V3. Otherwise a softmax does, as in V2."""
    renormalise: bool
    """Whether weights are divided by their sum."""
    scale: float
    """Factor on weights."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Groups from which a token's experts are chosen."""
    has_bias: bool = True
    """Whether experts are chosen by their sigmoids plus a trained bias."""
    least_sum: float = 1e-20
    """Added to the sum by which weights are divided: all weights may be 0."""
    sums_pairs: bool = False
    """Whether a group's two largest scores are added for the score of the group. Otherwise the largest score counts.
    Sigmoid scores are always added."""

    def __post_init__(self) -> None:
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or (self.num_groups > 1 and size < self.num_summed):
            least = ", with at least 2 in each group" if self.num_summed == 2 else ""
            raise ValueError(
                f"n_group is {self.num_groups}; it must divide n_routed_experts, which is {self.num_experts}{least}"
            )
        if self.num_chosen_groups > self.num_groups or self.num_chosen > self.num_chosen_groups * size:
            raise ValueError(
                f"topk_group is {self.num_chosen_groups}; it must be at most n_group, which is {self.num_groups}, and "
                f"groups of {size} experts must have num_experts_per_tok, which is {self.num_chosen}"
            )

    @property
    def num_summed(self) -> int:
        """How many of its largest scores a group's score sums."""
        return 2 if self.is_sigmoid or self.sums_pairs else 1


def choose_by_groups(scores: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts with the largest scores in the groups with the largest scores; among equals, the lowest number first.

    scores: [num_tokens, num_experts] float32, sigmoids or the softmax of logits. bias: [num_experts] float32, added to
    scores for the choice but not to weights; or None. Returns weights and experts as `choose_experts` does."""
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = ranked.view(-1, routing.num_groups, routing.num_experts // routing.num_groups)
        best = grouped.sort(dim=2, descending=True).values[:, :, : routing.num_summed].sum(2)
        order = best.sort(dim=1, descending=True, stable=True).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, order[:, : routing.num_chosen_groups], False)
        ranked = grouped.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)
    experts = ranked.sort(dim=1, descending=True, stable=True).indices[:, : routing.num_chosen]
    weights = scores.gather(1, experts)
    if routing.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + routing.least_sum)
    return weights * routing.scale, experts


def choose_experts(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits; among equals, the lowest number first.

    logits: [num_tokens, num_experts] float32. Returns weights [num_tokens, num_chosen] float32 and experts [num_tokens,
    num_chosen] int64. The weights are the softmax over all experts, or with `renormalise` over the chosen ones (Shazeer
    et al., 2017; Jiang et al., 2024).
    """
    ordered, experts = logits.sort(dim=1, descending=True, stable=True)
    weights = ordered[:, :num_chosen].softmax(1) if renormalise else ordered.softmax(1)[:, :num_chosen]
    return weights, experts[:, :num_chosen]


def group_rows(experts: Tensor, num_experts: int) -> ExpertRows:
    """experts: [num_tokens, num_chosen] int64, distinct for a token. The host does not wait for a GPU."""
    num_chosen = experts.shape[1]
    ordered, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(max(num_experts, len(order)), device=experts.device)
    places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    ends = torch.searchsorted(ordered, numbers[:num_experts], right=True)
    return ExpertRows(order // num_chosen, places.view(-1, num_chosen), ends)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor:
    """`x[row] @ weights[expert].T` for each row with its expert, summed in float32. x: [rows, inputs]; weights:
    [num_experts, outputs, inputs]; ends: see `ExpertRows`. Returns [rows, outputs] in x's dtype, or in float32 if
    `wide`."""
    parts = [
        pack_batch_invariant(weight, wide)(x[start:stop], None)
        for weight, (start, stop) in zip(weights, pairwise([0, *ends.tolist()]), strict=True)
    ]
    return torch.cat(parts)


def grouped_float8(x: Tensor, weight: Float8Weight, ends: Tensor, wide: bool = False) -> Tensor:
    """`grouped_linear` for e4m3, with the arithmetic of `kernels.float8`. weight: numbers and scales have a first
    dimension for experts; no input scale."""
    numbers, scales, _ = weight
    parts = []
    for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        own = Float8Weight(numbers[expert], scales[expert])
        parts.append(product_in_16_bits(own, pack_batch_invariant, wide)(x[start:stop], None))
    return torch.cat(parts)


def combine_rows(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each token's rows, in the order of its experts. rows: [num_tokens * num_chosen, size]; places:
    see `ExpertRows`; weights: [num_tokens, num_chosen] float32. Returns [num_tokens, size] float32."""
    total = torch.zeros(len(places), rows.shape[1], device=rows.device)
    for place, weight in zip(places.T, weights.T, strict=True):
        # As one operation, torch might use fused multiply-adds for some columns only.
        total += rows.index_select(0, place).float() * weight[:, None]
    return total


def pack_batch_invariant(weight: Tensor, wide: bool = False) -> Product:
    """A batch-invariant `kernels.reference.pack`: 16 rows at a time, padded with zeros. Slower for many rows."""
    factor = weight.float() if wide else weight

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        padded = functional.pad(x.to(factor.dtype), (0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = [functional.linear(tile, factor) for tile in torch.split(padded, _TILE_ROWS)]
        found = torch.cat(tiles)[: len(x)]
        return found if bias is None else found + bias

    return product
