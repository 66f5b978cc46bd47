"""Products of 8-bit floating-point numbers, e4m3 (Micikevicius et al., 2022), in eager torch: the oracle of kernels.

A weight has a scale for each output, and x one for each row, its largest number divided by 448. The product is
`(x_numbers @ weight_numbers.T) * weight_scales * x_scale + bias`, summed and scaled in float32. e4m3 numbers have 4
significant bits and are exact in bfloat16, and so are their products in float32: a product of bfloat16 numbers with
sums in float32 is the same arithmetic on a device that has no products of 8 bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3, which has no infinity."""
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability of GPUs with these numbers."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""A row of zeros has this scale, and stays zeros."""


class Float8Weight(NamedTuple):
    """A weight that is number * scale, for products with inputs in e4m3.

    numbers: [outputs, inputs] e4m3; scales: [outputs] float32; input_scale: [] float32, which all inputs are rounded
    with, or None where each row has its own.
    """

    numbers: Tensor
    scales: Tensor
    input_scale: Tensor | None = None


def narrowed(wide: Tensor, scales: Tensor) -> Tensor:
    """The e4m3 numbers nearest to `wide / scales`, both float32. What is beyond 448 becomes 448; NaN stays NaN."""
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(FLOAT8)  # which older versions of torch make NaN beyond 464


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in e4m3 with a scale of its own: [..., n] in floating point to [..., n] e4m3 and [..., 1] float32.

    A row that is not finite gets a scale or numbers that are NaN or infinite: all its products are NaN.
    """
    wide = x.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    return narrowed(wide, scales), scales


def quantize_float8(weight: Tensor) -> Float8Weight:
    """The nearest e4m3 numbers with a scale for each output. weight: [outputs, inputs]. Raises ValueError where it is
    not finite."""
    # Some rows at a time: a large weight in float32 would take more memory than its packed form.
    parts = [round_rows(rows) for rows in torch.split(weight, 4096)]
    numbers, scales = (torch.cat(found) for found in zip(*parts, strict=True))
    if not scales.isfinite().all():
        raise ValueError("a weight is not finite")
    return Float8Weight(numbers, scales.squeeze(1))


def round_inputs(
    x: Tensor, weight: Float8Weight, round_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows
) -> tuple[Tensor, Tensor]:
    """The inputs of a product with `weight` as it asks for them: [rows, inputs] e4m3, and [rows, 1] or [] float32."""
    if weight.input_scale is None:
        return round_rows(x)
    return narrowed(x.float(), weight.input_scale), weight.input_scale


def float8_product(
    weight: Float8Weight,
    multiply: Callable[[Tensor], Tensor],
    wide: bool,
    round_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows,
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A `kernels.ops.Product` of sums of products that `multiply` makes, [rows, inputs] e4m3 to [rows, outputs] float32
    in memory of their own. wide: whether it returns float32 rather than the dtype of x."""
    scaling = weight._replace(numbers=weight.numbers.new_empty(0))  # which `multiply` holds, in the form that it needs

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        numbers, row_scales = round_inputs(x, scaling, round_rows)
        found = multiply(numbers).mul_(scaling.scales).mul_(row_scales)
        if bias is not None:
            found += bias
        return found if wide else found.to(x.dtype)

    return product
