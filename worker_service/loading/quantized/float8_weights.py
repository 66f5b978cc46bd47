"""Reads layers whose weights are stored in e4m3 and whose inputs are rounded to e4m3. These layers have the format
"float-quantized" of compressed-tensors, or the method "fp8".

A layer's weights have one scale, a scale for each output, or a scale for each block of outputs and inputs. If the
checkpoint contains an `input_scale` for the layer, inputs are rounded with this scale. If there is no `input_scale`, a
scale is computed for each row of inputs. If the weights have a scale for each block, a scale is computed for each block
of inputs in a row.
"""

import torch
from torch import Tensor

from kernels.float8 import Float8Weight
from worker_service.loading.quantized.compressed_groups import Block
from worker_service.wording import shown


def float8_weight(
    numbers: Tensor, scales: Tensor, input_scale: Tensor | None, block: Block | None = None
) -> Float8Weight:
    """Check and convert the tensors of a layer. Raises ValueError if their shapes do not match, or if a value is not
    finite.

    numbers is [outputs, inputs] e4m3. scales is [blocks of outputs, blocks of inputs] if `block` is given; without
    `block`, [outputs], [outputs, 1] or a single scale.
    """
    outputs, inputs = numbers.shape
    if block is not None:
        if input_scale is not None:
            raise ValueError("there is a stored scale of inputs, which are rounded by block where weights have blocks")
        if inputs % block[1] or scales.shape != (-(-outputs // block[0]), inputs // block[1]):
            raise ValueError(
                f"{list(scales.shape)} scales do not fit weights of {list(numbers.shape)} in blocks of {list(block)}; "
                "the last block of outputs may be smaller, and no block of inputs"
            )
        scales = scales.float().repeat_interleave(min(block[0], outputs), dim=0)[:outputs].contiguous()
    elif scales.numel() != 1 and list(scales.shape) not in ([outputs], [outputs, 1]):
        raise ValueError(
            f"{list(scales.shape)} scales do not fit weights of {list(numbers.shape)}: one for each output, or one for "
            "all, are read"
        )
    else:
        scales = scales.float().reshape(-1, 1).expand(outputs, 1).contiguous()
    # Only NaN must be searched for, because e4m3 has no infinity. In e4m3, NaN has ones in all bits after the sign bit.
    if not scales.isfinite().all() or (numbers.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError("a weight or a scale is not finite")
    if input_scale is not None:
        input_scale = input_scale.float().squeeze()
        if input_scale.dim() or not 0 < float(input_scale) < float("inf"):
            raise ValueError(f"input_scale is {shown(input_scale.tolist())}; it must be one positive number")
    return Float8Weight(numbers, scales, input_scale)
