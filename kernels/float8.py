"""Products of 8-bit floating-point numbers, e4m3 (Micikevicius et al., 2022), in eager torch: the oracle of kernels.

A weight has a scale for each output. x has a scale for each row, its largest number divided by 448. The product is
`(x_numbers @ weight_numbers.T) * weight_scales * x_scale + bias`, summed and scaled in float32. With a scale for each
of several groups of neighbouring inputs (DeepSeek-AI, 2024), it is the sum of the groups' products, in their order.
e4m3 numbers have 4 significant bits and are exact in bfloat16; their products are exact in float32. So a product of
bfloat16 numbers with sums in float32 is the same arithmetic on a device without 8-bit products.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3, which has no infinity."""
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability of GPUs with e4m3."""
_Product = Callable[[Tensor, Tensor | None], Tensor]
MIN_SCALE = torch.finfo(torch.float32).tiny
"""Scale of a row of zeros, which stays zeros."""


class Float8Weight(NamedTuple):
    """A weight as numbers times scales, for products with inputs in e4m3.

    numbers: [outputs, inputs] e4m3; scales: [outputs, groups] float32, each for `inputs / groups` neighbouring inputs;
    input_scale: [] float32, the scale of all inputs (one group only), or None if each row has a scale for each group.
    """

    numbers: Tensor
    scales: Tensor
    input_scale: Tensor | None = None


def narrowed(wide: Tensor, scales: Tensor) -> Tensor:
    """The e4m3 numbers nearest to `wide / scales`, both float32. Magnitudes beyond 448 become 448; NaN stays NaN."""
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(FLOAT8)  # older versions of torch make numbers beyond 464 NaN


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to e4m3 with its own scale: [..., n] in floating point to [..., n] e4m3 and [..., 1] float32.

    A row that is not finite gets a scale or numbers that are NaN or infinite: all its products are NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    # A GPU divides a tensor by a Python number as a product with its reciprocal, which is rounded twice.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp_(min=MIN_SCALE)
    return narrowed(wide, scales), scales


def quantize_float8(weight: Tensor) -> Float8Weight:
    """The nearest e4m3 numbers with a scale for each output. weight: [outputs, inputs]. Raises ValueError if it is not
    finite."""
    # A few rows at a time: a large weight in float32 would take more memory than its packed form.
    parts = [round_rows(rows) for rows in torch.split(weight, 4096)]
    numbers, scales = (torch.cat(found) for found in zip(*parts, strict=True))
    if not scales.isfinite().all():
        raise ValueError("a weight is not finite")
    return Float8Weight(numbers, scales)


def widened(weight: Float8Weight) -> Tensor:
    """The dequantised weight, [outputs, inputs] float32."""
    wide = weight.numbers.float()
    return wide.view(*weight.scales.shape, -1).mul_(weight.scales[..., None]).view(wide.shape)


def round_inputs(
    x: Tensor, weight: Float8Weight, round_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows
) -> tuple[Tensor, Tensor]:
    """Quantise the inputs of a product with `weight`: [rows, inputs] e4m3, and scales [rows, groups] float32."""
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
    """A `kernels.ops.Product` that scales and adds the groups' products.

    multiply: for each group, a function from [rows, inputs] e4m3 to [rows, outputs] float32 in memory of their own.
    wide: whether the product returns float32 instead of the dtype of x.
    """
    scaling = weight._replace(numbers=weight.numbers.new_empty(0))  # `multiply` holds the numbers, in its own form

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
    """`float8_product` of a weight held in bfloat16. pack: makes a product, as in `kernels.ops.Ops`."""
    groups = weight.numbers.bfloat16().chunk(weight.scales.shape[1], dim=1)
    products = [pack(numbers.contiguous(), True) for numbers in groups]
    return float8_product(weight, [partial(_multiply, product) for product in products], wide)


def _multiply(product: _Product, numbers: Tensor) -> Tensor:
    return product(numbers.bfloat16(), None)
