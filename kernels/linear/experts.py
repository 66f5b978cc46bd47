"""A mixture of experts in eager torch: the choice of each token's experts, the experts' products, and the weighted sum
of their outputs.

All functions are batch-invariant, although other tokens decide how many rows an expert has. A product sums a row in one
order for any number of rows. The outputs of a token's experts are added in the order in which the experts were chosen.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.float8 import Float8Weight, product_in_16_bits
from kernels.ops import Product

_TILE_ROWS = 16
"""Number of rows of each product of `pack_batch_invariant`. A library's order of summation depends on the number of
rows: in MKL, 3 rows and 4 rows have different orders. The order does not depend on a row's place."""


class ExpertRows(NamedTuple):
    """The rows of a mixture's products, grouped by expert. Each token has one row for each of its experts."""

    tokens: Tensor
    """[rows] int64: the token of each row. The rows of an expert are in the order of tokens."""
    places: Tensor
    """[num_tokens, num_chosen] int64: the rows of each token, in the order in which the token's experts were chosen."""
    ends: Tensor
    """[num_experts] int64: the end of each expert's rows. The next expert's rows begin at this end."""


def choose_experts(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits, and their weights. Among experts with equal logits, the lowest number comes
    first.

    logits: [num_tokens, num_experts] float32. Returns weights, [num_tokens, num_chosen] float32, and experts,
    [num_tokens, num_chosen] int64. Weights are the softmax over all experts. If `renormalise`, weights are the softmax
    over the chosen experts and sum to 1. (Shazeer et al., 2017; Jiang et al., 2024.)
    """
    ordered, experts = logits.sort(dim=1, descending=True, stable=True)
    weights = ordered[:, :num_chosen].softmax(1) if renormalise else ordered.softmax(1)[:, :num_chosen]
    return weights, experts[:, :num_chosen]


def group_rows(experts: Tensor, num_experts: int) -> ExpertRows:
    """Group a mixture's rows by expert. experts: [num_tokens, num_chosen] int64; a token's experts are distinct. The
    function does not wait for a GPU."""
    num_chosen = experts.shape[1]
    ordered, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(max(num_experts, len(order)), device=experts.device)
    places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    ends = torch.searchsorted(ordered, numbers[:num_experts], right=True)
    return ExpertRows(order // num_chosen, places.view(-1, num_chosen), ends)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor:
    """Multiply each row by its expert's weight: `x[row] @ weights[expert].T`, summed in float32.

    x: [rows, inputs]; weights: [num_experts, outputs, inputs]; ends: see `ExpertRows`. Returns [rows, outputs], in
    float32 if `wide`, otherwise in the dtype of x.
    """
    parts = [
        pack_batch_invariant(weight, wide)(x[start:stop], None)
        for weight, (start, stop) in zip(weights, pairwise([0, *ends.tolist()]), strict=True)
    ]
    return torch.cat(parts)


def grouped_float8(x: Tensor, weight: Float8Weight, ends: Tensor, wide: bool = False) -> Tensor:
    """The operation `grouped_linear` for e4m3 weights, with the arithmetic of `kernels.float8`. weight: numbers and
    scales have a first dimension of experts; there is no input scale."""
    numbers, scales, _ = weight
    parts = []
    for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        own = Float8Weight(numbers[expert], scales[expert])
        parts.append(product_in_16_bits(own, pack_batch_invariant, wide)(x[start:stop], None))
    return torch.cat(parts)


def combine_rows(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's rows, added in the order in which experts were chosen.

    rows: [num_tokens * num_chosen, size]; places: see `ExpertRows`; weights: [num_tokens, num_chosen] float32. Returns
    [num_tokens, size] float32.
    """
    total = torch.zeros(len(places), rows.shape[1], device=rows.device)
    for place, weight in zip(places.T, weights.T, strict=True):
        # Product and sum are two operations, because torch might use a fused multiply-add for some columns only.
        total += rows.index_select(0, place).float() * weight[:, None]
    return total


def pack_batch_invariant(weight: Tensor, wide: bool = False) -> Product:
    """The batch-invariant version of `kernels.reference.pack`. Each product has 16 rows, padded with zeros. If x has
    many rows, many products are needed, which is slower than one large product."""
    factor = weight.float() if wide else weight

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        padded = functional.pad(x.to(factor.dtype), (0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = [functional.linear(tile, factor) for tile in torch.split(padded, _TILE_ROWS)]
        found = torch.cat(tiles)[: len(x)]
        return found if bias is None else found + bias

    return product
