"""Products of inputs and weights in the 8-bit floating-point format e4m3 (Micikevicius et al., 2022), in eager torch.
These functions are the oracle with which tests compare the kernels for e4m3.

A weight matrix has a scale for each output. The inputs x have a scale for each row, which is the row's largest
magnitude divided by 448. The product is `(x_numbers @ weight_numbers.T) * weight_scales * x_scale + bias`, summed and
scaled in float32. If neighbouring inputs form several groups with a scale each (DeepSeek-AI, 2024), the product is the
sum of the groups' products, in order. e4m3 numbers have 4 significant bits. bfloat16 represents e4m3 numbers exactly,
and float32 represents the product of two e4m3 numbers exactly. A device without e4m3 products can therefore multiply in
bfloat16 and sum in float32, with the same arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of the format e4m3, which has no infinity."""
FLOAT8_CAPABILITY = (8, 9)
"""The lowest compute capability with which a GPU supports e4m3."""
_Product = Callable[[Tensor, Tensor | None], Tensor]
MIN_SCALE = torch.finfo(torch.float32).tiny
"""The scale of a row that contains only zeros. The quantised numbers of such a row are zeros, too."""


class Float8Weight(NamedTuple):
    """A weight matrix in e4m3, for products with inputs that are quantised to e4m3.

    numbers is [outputs, inputs] e4m3. scales is [outputs, groups] float32, where a group is `inputs / groups`
    neighbouring inputs. input_scale is [] float32, the scale with which all rows of x are quantised; allowed only if
    there is one group. input_scale is None if a scale is computed for each row of x and each group.
    """

    numbers: Tensor
    scales: Tensor
    input_scale: Tensor | None = None


def narrowed(wide: Tensor, scales: Tensor) -> Tensor:
    """Round `wide / scales` to the nearest e4m3 numbers. Magnitudes above 448 become 448, and NaN stays NaN. wide,
    scales: float32."""
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(FLOAT8)  # older torch versions turn larger values into NaN


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of x to e4m3, with a scale for each row. x is [..., n] in floating point. Returns numbers,
    [..., n] e4m3, and scales, [..., 1] float32.

    If a row of x is not finite, its scale or its numbers are not finite, so all products of the row become NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    # The divisor is a tensor, not a Python number, because torch on a GPU would multiply by the reciprocal of a Python
    # number. The result would then be rounded twice.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp_(min=MIN_SCALE)
    return narrowed(wide, scales), scales


def quantize_float8(weight: Tensor) -> Float8Weight:
    """Quantise a weight matrix to e4m3, with a scale for each output. weight is [outputs, inputs]. Raises ValueError if
    the weight is not finite."""
    # The weight is converted 4,096 rows at a time, because a large weight in float32 would occupy much memory.
    parts = [round_rows(rows) for rows in torch.split(weight, 4096)]
    numbers, scales = (torch.cat(found) for found in zip(*parts, strict=True))
    if not scales.isfinite().all():
        raise ValueError("a weight is not finite")
    return Float8Weight(numbers, scales)


def widened(weight: Float8Weight) -> Tensor:
    """Dequantise an e4m3 weight matrix to [outputs, inputs] float32."""
    wide = weight.numbers.float()
    return wide.view(*weight.scales.shape, -1).mul_(weight.scales[..., None]).view(wide.shape)


def round_inputs(
    x: Tensor, weight: Float8Weight, round_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows
) -> tuple[Tensor, Tensor]:
    """Quantise the inputs x for a product by `weight`. Returns numbers, [rows, inputs] e4m3, and scales, [rows, groups]
    float32."""
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
    """Build a `kernels.ops.Product` for an e4m3 weight. The product multiplies group by group, scales the groups'
    products, and adds them.

    multiply: for each group, a function that multiplies x's numbers, [rows, inputs of the group] e4m3, and returns
    newly allocated sums, [rows, outputs] float32. wide: whether the product returns float32 instead of the dtype of x.
    """
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
    """Build a `float8_product` that stores the weight in bfloat16. pack: the function that packs the bfloat16 weight,
    see `kernels.ops.Ops`."""
    groups = weight.numbers.bfloat16().chunk(weight.scales.shape[1], dim=1)
    products = [pack(numbers.contiguous(), True) for numbers in groups]
    return float8_product(weight, [partial(_multiply, product) for product in products], wide)


def _multiply(product: _Product, numbers: Tensor) -> Tensor:
    return product(numbers.bfloat16(), None)
