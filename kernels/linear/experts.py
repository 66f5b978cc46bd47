"""A mixture of experts in eager torch: the choice of each token's experts, the products by the experts' weights, and
the weighted sum of the experts' outputs.

All functions of this module are batch-invariant, although an expert's number of rows depends on all tokens of the
batch. A product sums each row in the same order, for any number of rows. The outputs of a token's experts are added in
the order in which the experts were chosen.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.float8 import Float8Weight, product_in_16_bits
from kernels.ops import Product

_TILE_ROWS = 16
"""Number of rows of each product that `pack_batch_invariant` computes. The order in which a BLAS library sums a row
depends on the number of rows: MKL, for example, uses different orders for 3 rows and for 4 rows. The order does not
depend on the place of the row among the rows."""


class ExpertRows(NamedTuple):
    """The rows that the experts of a mixture multiply, grouped by expert. Each token has one row for each of its
    experts."""

    tokens: Tensor
    """[rows] int64: the number of each row's token. The rows of an expert are in the order of their tokens."""
    places: Tensor
    """[num_tokens, num_chosen] int64: the numbers of each token's rows, in the order in which the token's experts were
    chosen."""
    ends: Tensor
    """[num_experts] int64: the number of the row after each expert's last row, which is the first row of the next
    expert."""


def choose_experts(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest logits for each token, and compute their weights. Among experts with equal
    logits, the expert with the lowest number comes first.

    logits: the router's logits, [num_tokens, num_experts] float32. Returns weights, [num_tokens, num_chosen] float32,
    and experts, [num_tokens, num_chosen] int64. The weights are the softmax over all experts. If `renormalise` is true,
    the weights are the softmax over the chosen experts, and sum to 1. (Shazeer et al., 2017; Jiang et al., 2024.)
    """
    ordered, experts = logits.sort(dim=1, descending=True, stable=True)
    weights = ordered[:, :num_chosen].softmax(1) if renormalise else ordered.softmax(1)[:, :num_chosen]
    return weights, experts[:, :num_chosen]


def group_rows(experts: Tensor, num_experts: int) -> ExpertRows:
    """Group the rows of a mixture by expert. experts is [num_tokens, num_chosen] int64, the chosen experts of each
    token, which must be distinct. On a GPU, the host does not wait for the result."""
    num_chosen = experts.shape[1]
    ordered, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(max(num_experts, len(order)), device=experts.device)
    places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    ends = torch.searchsorted(ordered, numbers[:num_experts], right=True)
    return ExpertRows(order // num_chosen, places.view(-1, num_chosen), ends)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor:
    """Multiply each row of x by the weight of the row's expert: `x[row] @ weights[expert].T`, summed in float32.

    x is [rows, inputs]; weights is [num_experts, outputs, inputs]; ends: see `ExpertRows`. Returns [rows, outputs], in
    float32 if `wide` is true, or else in the dtype of x.
    """
    parts = [
        pack_batch_invariant(weight, wide)(x[start:stop], None)
        for weight, (start, stop) in zip(weights, pairwise([0, *ends.tolist()]), strict=True)
    ]
    return torch.cat(parts)


def grouped_float8(x: Tensor, weight: Float8Weight, ends: Tensor, wide: bool = False) -> Tensor:
    """The operation `grouped_linear` for e4m3 weights, with the arithmetic that `kernels.float8` defines. weight: the
    weights of all experts. The weight's numbers and scales have an additional first dimension for the experts, and the
    weight has no input scale."""
    numbers, scales, _ = weight
    parts = []
    for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        own = Float8Weight(numbers[expert], scales[expert])
        parts.append(product_in_16_bits(own, pack_batch_invariant, wide)(x[start:stop], None))
    return torch.cat(parts)


def combine_rows(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted sum of each token's rows. A token's rows are added in the order in which its experts were
    chosen.

    rows is [num_tokens * num_chosen, size], the experts' outputs. places: see `ExpertRows`. weights is [num_tokens,
    num_chosen] float32. Returns [num_tokens, size] float32.
    """
    total = torch.zeros(len(places), rows.shape[1], device=rows.device)
    for place, weight in zip(places.T, weights.T, strict=True):
        # The product and the sum are two separate operations. If they were one operation, torch might use fused
        # multiply-adds for only some of the columns.
        total += rows.index_select(0, place).float() * weight[:, None]
    return total


def pack_batch_invariant(weight: Tensor, wide: bool = False) -> Product:
    """The batch-invariant version of `kernels.reference.pack`. The rows of x are padded with zeros to a multiple of 16,
    and 16 rows at a time are multiplied. For many rows, these products are slower than one large product."""
    factor = weight.float() if wide else weight

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        padded = functional.pad(x.to(factor.dtype), (0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = [functional.linear(tile, factor) for tile in torch.split(padded, _TILE_ROWS)]
        found = torch.cat(tiles)[: len(x)]
        return found if bias is None else found + bias

    return product
