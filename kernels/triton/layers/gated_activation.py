"""`activation(gate) * up` from the fused gate and up projections, in one pass, rounded once.

    `x`         [..., 2 * n]: the gate, followed by up; in turn for `ClampedSwiglu`.
    `program`   1,024 columns of one row of the result.

    `silu`       g / (1 + exp(-g)).
    `gelu`       g / 2 * (1 + erf(g / sqrt(2))).
    `gelu_tanh`  g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 g³)), as with tanh.
    `sigmoid`    1 / (1 + exp(-g)).
    `softplus`   log(1 + exp(g)), from exp(-|g|), which cannot overflow.
    `clamped`    g * sigmoid(alpha * g), times up + 1 in place of up, with g and up within a limit.

Oracle: `kernels.reference.gated_activation`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import Activation, ClampedSwiglu
from kernels.triton.launch import OPTIONS

_COLUMNS = 1024


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    name, alpha, limit = ("clamped", *activation) if isinstance(activation, ClampedSwiglu) else (activation, 0.0, 0.0)
    width = x.shape[-1] // 2
    output = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, 2 * width)
    if len(rows):
        columns = min(_COLUMNS, triton.next_power_of_2(width))
        _gated_activation_kernel[(len(rows), triton.cdiv(width, columns))](
            rows, output, rows.stride(0), width, alpha, limit, activation=name, columns=columns, num_warps=4, **OPTIONS
        )
    return output


@triton.jit
def _gated_activation_kernel(
    x, output, row_stride, width, alpha, limit, activation: tl.constexpr, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    step: tl.constexpr = 2 if activation == "clamped" else 1
    behind = 1 if activation == "clamped" else width
    gate = tl.load(x + row * row_stride + column * step, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + behind + column * step, mask=inside, other=0.0).to(tl.float32)
    if activation == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        activated = gate * tl.sigmoid(alpha * gate)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
    elif activation == "silu":
        activated = gate * tl.sigmoid(gate)
    elif activation == "gelu_tanh":
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif activation == "sigmoid":
        activated = tl.sigmoid(gate)
    elif activation == "softplus":
        small = tl.exp(-tl.abs(gate))
        logarithm = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
        activated = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) + logarithm
    else:
        activated = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    tl.store(output + row * width + column, (activated * up).to(output.dtype.element_ty), mask=inside)
