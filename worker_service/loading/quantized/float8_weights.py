"""Reads layers with weights and inputs in e4m3: "float-quantized" of compressed-tensors, or "fp8". Inputs have the
checkpoint's `input_scale`, or a scale for each row, or for each block of a row if weights have blocks."""

import torch
from torch import Tensor

from kernels.float8 import Float8Weight
from worker_service.loading.quantized.compressed_groups import Block
from worker_service.wording import shown


def float8_weight(
    numbers: Tensor, scales: Tensor, input_scale: Tensor | None, block: Block | None = None
) -> Float8Weight:
    """Raises ValueError if shapes do not match or a value is not finite. numbers: [outputs, inputs] e4m3. scales:
    [blocks of outputs, blocks of inputs] with `block`; otherwise [outputs], [outputs, 1] or one scale."""
    outputs, inputs = numbers.shape
    if block is not None:
        if input_scale is not None:
            raise ValueError("there is an input_scale, which is not supported for weights with a scale for each block")
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
    # e4m3 has no infinity; NaN has ones in all bits after the sign.
    if not scales.isfinite().all() or (numbers.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError("a weight or a scale is not finite")
    if input_scale is not None:
        input_scale = input_scale.float().squeeze()
        if input_scale.dim() or not 0 < float(input_scale) < float("inf"):
            raise ValueError(f"input_scale is {shown(input_scale.tolist())}; it must be one positive number")
    return Float8Weight(numbers, scales, input_scale)
