"""Operations on states with random inputs, for tests of every backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.inputs import AttentionMetadata

CPU = torch.device("cpu")
NAN = float("nan")
LENS = [(1, 1), (1, 40), (5, 5), (70, 100), (0, 7), (2, 130), (3, 3)]
"""Query tokens and context of each sequence."""


@dataclass
class Operation:
    by_token: Sequence[Tensor]
    """Inputs, [tokens, ...]."""
    state: tuple[int, ...]
    call: Callable[..., Tensor]
    """Arguments: the backend, inputs, states, metadata."""
    state_dtype: torch.dtype = torch.float32


def tensors(tokens: int, dtype: torch.dtype, device: torch.device, *sizes: tuple[int, ...]) -> list[Tensor]:
    """Numbers of [tokens, *sizes]. Tokens lie further apart than they are long, as parts of a fused projection do."""
    generator = torch.Generator().manual_seed(2)
    numbers = (torch.randn(tokens, size[0] + 1, *size[1:], generator=generator) for size in sizes)
    return [part.to(device, dtype)[:, : size[0]] for part, size in zip(numbers, sizes, strict=True)]


def weights(*size: int, device: torch.device = CPU) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(3)).to(device)


def convolution(
    tokens: int, dtype: torch.dtype, taps: int = 4, silu: bool = True, device: torch.device = CPU
) -> Operation:
    """Without silu, weights are float32."""
    weight = weights(300, taps, device=device).to(dtype if silu else torch.float32)
    bias = weights(300, device=device).to(dtype) if silu else None
    activation = "silu" if silu else None
    return Operation(
        tensors(tokens, dtype, device, (300,)),
        (300, taps - 1),
        lambda ops, inputs, states, metadata: ops.short_convolution(
            *inputs, weight, bias, states, metadata, activation
        ),
        dtype,
    )


def delta_rule(
    tokens: int,
    dtype: torch.dtype,
    decays: int = 1,
    has_beta: bool = True,
    normalize: bool = True,
    device: torch.device = CPU,
) -> Operation:
    query, key, value = tensors(tokens, dtype, device, (2, 20), (2, 20), (6, 37))
    (decay,) = tensors(tokens, torch.float32, device, (6, decays))
    decay, beta = -functional.softplus(decay), value[..., 0].sigmoid()
    if not normalize:
        key = key / 5
    return Operation(
        [query, key, value, decay if decays > 1 else decay[..., 0], beta],
        (6, 20, 37),
        lambda ops, inputs, states, metadata: ops.gated_delta_rule(
            *inputs[:4], inputs[4] if has_beta else None, states, metadata, normalize
        ),
    )


def scan(
    tokens: int,
    dtype: torch.dtype,
    heads: int = 4,
    size: int = 21,
    groups: int = 2,
    has_d: bool = False,
    device: torch.device = CPU,
) -> Operation:
    """With one head, or heads of one row, Mamba: each row has its own dt and D, and each number of the state its A."""
    x, b, c = tensors(tokens, dtype, device, (heads, size), (groups, 20), (groups, 20))
    (dt,) = tensors(tokens, torch.float32, device, (heads, size))
    dt, is_mamba = functional.softplus(dt), heads == 1 or size == 1
    a, d = -weights(heads, device=device).exp(), weights(heads, device=device) if has_d else None
    if is_mamba:
        a, d = -weights(heads, size, 20, device=device).exp(), weights(heads, size, device=device)
    return Operation(
        [x, dt if is_mamba else dt[..., 0], b, c],
        (heads, size, 20),
        lambda ops, inputs, states, metadata: ops.selective_scan(*inputs[:2], a, *inputs[2:], d, states, metadata),
    )


OPERATIONS: dict[str, Callable[..., Operation]] = {
    "convolution": convolution,
    "convolution_of_3": partial(convolution, taps=3, silu=False),
    "delta_rule": delta_rule,
    "delta_rule_by_row": partial(delta_rule, decays=20, normalize=False),
    "linear_attention": partial(delta_rule, has_beta=False, normalize=False),
    "mamba_2": scan,
    "mamba_2_with_skip": partial(scan, has_d=True),
    "mamba": partial(scan, heads=1, size=70, groups=1),
    "mamba_by_heads": partial(scan, heads=70, size=1, groups=1),
}
each_operation = pytest.mark.parametrize("make", OPERATIONS.values(), ids=OPERATIONS)


def pool_for(operation: Operation, num_blocks: int, device: torch.device = CPU) -> Tensor:
    """States in blocks that are neither aligned nor adjacent, NaN."""
    size = torch.Size(operation.state).numel()
    pool = torch.full((num_blocks, size + 3), NAN, dtype=operation.state_dtype, device=device)
    return pool[:, 1 : size + 1].unflatten(1, operation.state)


def batch(lens: Sequence[tuple[int, int]], blocks: Sequence[int], device: torch.device = CPU) -> AttentionMetadata:
    return AttentionMetadata.build(
        [n for n, _ in lens], [context for _, context in lens], torch.tensor(blocks).view(-1, 1), device
    )


def case(
    operation: Operation, lens: Sequence[tuple[int, int]] = LENS, device: torch.device = CPU
) -> tuple[Tensor, AttentionMetadata]:
    """States of the sequences that continue, NaN in all other blocks; and the metadata."""
    blocks = [5, 0, 7, 3, 99, 1, 6][: len(lens)]  # nothing is computed of the fifth
    states = pool_for(operation, 9, device)
    for (query_len, context), block in zip(lens, blocks, strict=True):
        if 0 < query_len < context:
            states[block] = weights(*operation.state, device=device) / 2
    return states, batch(lens, blocks, device)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
