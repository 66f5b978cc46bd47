"""Products of inputs and weights in e4m3 (Micikevicius et al., 2022), in eager torch, the oracle of the tests.

Weights have a scale for each output, inputs for each row: the largest magnitude / 448. The product is `(x_numbers @
weight_numbers.T) * weight_scales * x_scale + bias`, in float32. With scales for groups of inputs (DeepSeek-AI, 2024),
the groups' products are summed in order. bfloat16 represents e4m3 exactly, and float32 represents products of two e4m3
numbers exactly, so other devices can use the same arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Maximum of e4m3, which has no infinity."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with e4m3."""
_Product = Callable[[Tensor, Tensor | None], Tensor]
MIN_SCALE = torch.finfo(torch.float32).tiny
"""Scale of a row of zeros."""


class Float8Weight(NamedTuple):
    """numbers: [outputs, inputs] e4m3. scales: [outputs, groups] float32 for groups of `inputs / groups` neighbours.
    input_scale: [] float32 for all rows of x, with one group only; None: computed for each row and group."""

    numbers: Tensor
    scales: Tensor
    input_scale: Tensor | None = None


def narrowed(wide: Tensor, scales: Tensor) -> Tensor:
    """Round float32 `wide / scales` to nearest e4m3, magnitudes at most 448; NaN stays NaN."""
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(FLOAT8)  # older torch versions turn larger values into NaN


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., n] to e4m3 [..., n], with scales [..., 1] float32. If a row is not finite, all its products
    become NaN."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    # A tensor: a GPU would multiply by the reciprocal of a Python number, and round twice.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp_(min=MIN_SCALE)
    return narrowed(wide, scales), scales


def quantize_float8(weight: Tensor) -> Float8Weight:
    """Quantise [outputs, inputs] with a scale for each output. Raises ValueError if not finite."""
    # 4,096 rows at a time, because a large weight in float32 would take much memory.
    parts = [round_rows(rows) for rows in torch.split(weight, 4096)]
    numbers, scales = (torch.cat(found) for found in zip(*parts, strict=True))
    if not scales.isfinite().all():
        raise ValueError("a weight is not finite")
    return Float8Weight(numbers, scales)


def widened(weight: Float8Weight) -> Tensor:
    """Dequantise to [outputs, inputs] float32."""
    wide = weight.numbers.float()
    return wide.view(*weight.scales.shape, -1).mul_(weight.scales[..., None]).view(wide.shape)


def round_inputs(
    x: Tensor, weight: Float8Weight, round_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows
) -> tuple[Tensor, Tensor]:
    """Quantise x for `weight`. Returns [rows, inputs] e4m3, and scales [rows, groups] float32."""
    if weight.input_scale is not None:
        return narrowed(x.float(), weight.input_scale), weight.input_scale.repeat(len(x), 1)
    groups = weight.scales.shape[1]
    numbers, scales = round_rows(x.reshape(len(x) * groups, x.shape[1] // groups))
    return numbers.view(x.shape), scales.view(-1, groups)


def float8_product(
    weight: Float8Weight,
    multiply: Sequence[Callable[[Tensor], Tensor]],
    wide: bool,
    round_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows,
) -> _Product:
    """A product that multiplies group by group, scales, and adds. multiply: for each group, from [rows, inputs of
    the group] e4m3 to newly allocated [rows, outputs] float32. wide: whether the result is float32 in place of x's
    dtype."""
    scaling = weight._replace(numbers=weight.numbers.new_empty(0))  # `multiply` has the numbers

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        numbers, row_scales = round_inputs(x, scaling, round_rows)
        found: Tensor | None = None
        parts = numbers.chunk(len(multiply), dim=1)
        for group, (one, part) in enumerate(zip(multiply, parts, strict=True)):
            scaled = one(part).mul_(scaling.scales[:, group]).mul_(row_scales[:, group, None])
            found = scaled if found is None else found.add_(scaled)
        assert found is not None
        if bias is not None:
            found += bias
        return found if wide else found.to(x.dtype)

    return product


def product_in_16_bits(weight: Float8Weight, pack: Callable[[Tensor, bool], _Product], wide: bool) -> _Product:
    """A `float8_product` with the weight in bfloat16. pack: see `kernels.ops.Ops`."""
    groups = weight.numbers.bfloat16().chunk(weight.scales.shape[1], dim=1)
    products = [pack(numbers.contiguous(), True) for numbers in groups]
    return float8_product(weight, [partial(_multiply, product) for product in products], wide)


def _multiply(product: _Product, numbers: Tensor) -> Tensor:
    return product(numbers.bfloat16(), None)
