"""Weights in MXFP4 (OCP Microscaling Formats, 2023), in eager torch: floats of 4 bits (e2m1), of which 32 neighbouring
inputs of an output share a power of two."""

import torch
from torch import Tensor

from kernels.ops import MxFloat4Weight

GROUP = 32
"""Inputs that share a scale."""
NOT_A_NUMBER = 255
"""A scale."""
MAX_SCALE = 252
"""Largest scale with which all numbers are finite in bfloat16."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def widened(weight: MxFloat4Weight) -> Tensor:
    """Dequantise to [outputs, inputs] float32. bfloat16 represents every result from 2**-126 on exactly."""
    values = torch.tensor((*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)))
    numbers = values[weight.numbers.int()].view(*weight.scales.shape, GROUP)
    return torch.ldexp(numbers, weight.scales[..., None].int() - 127).flatten(1)
