"""`activation(gate) * up` from the fused gate and up projections, in one pass, rounded once.

    `x`         [..., 2 * n]: the gate, followed by up.
    `program`   1,024 columns of one row of the result.

    `silu`       g / (1 + exp(-g)).
    `gelu`       g / 2 * (1 + erf(g / sqrt(2))).
    `gelu_tanh`  g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 g³)), as with tanh.

Oracle: `kernels.reference.gated_activation`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS

_COLUMNS = 1024


def gated_activation(x: Tensor, activation: str) -> Tensor:
    width = x.shape[-1] // 2
    output = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, 2 * width)
    if len(rows):
        columns = min(_COLUMNS, triton.next_power_of_2(width))
        _gated_activation_kernel[(len(rows), triton.cdiv(width, columns))](
            rows, output, rows.stride(0), width, activation=activation, columns=columns, num_warps=4, **OPTIONS
        )
    return output


@triton.jit
def _gated_activation_kernel(x, output, row_stride, width, activation: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    if activation == "silu":
        activated = gate * tl.sigmoid(gate)
    elif activation == "gelu_tanh":
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    tl.store(output + row * width + column, (activated * up).to(output.dtype.element_ty), mask=inside)
