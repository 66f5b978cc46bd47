"""Layers that are stored in e4m3 with inputs that are rounded to it: compressed-tensors' "float-quantized", and "fp8".

A layer has a scale for each output, or one for all, or one for each block of some outputs and inputs. Inputs are
rounded with the scale that the file has for them (`input_scale`), or each row with its own, and where there are blocks
each row with one for the inputs of each.
"""

import torch
from torch import Tensor

from kernels.float8 import Float8Weight
from worker_service.loading.quantized.compressed_groups import Block
from worker_service.wording import shown


def float8_weight(
    numbers: Tensor, scales: Tensor, input_scale: Tensor | None, block: Block | None = None
) -> Float8Weight:
    """numbers: [outputs, inputs] e4m3; scales: of each `block`, [blocks of outputs, blocks of inputs], or without one
    of each output, [outputs] or [outputs, 1], or of all. Raises ValueError where they do not fit, or are no numbers."""
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
    # NaN in e4m3 is all ones behind the sign, and there is no infinity.
    if not scales.isfinite().all() or (numbers.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError("a weight or a scale is not finite")
    if input_scale is not None:
        input_scale = input_scale.float().squeeze()
        if input_scale.dim() or not 0 < float(input_scale) < float("inf"):
            raise ValueError(f"input_scale is {shown(input_scale.tolist())}; it must be one positive number")
    return Float8Weight(numbers, scales, input_scale)
