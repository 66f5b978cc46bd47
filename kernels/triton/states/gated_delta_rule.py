"""The gated delta rule, token by token: `S = exp(decay) S + kᵀ beta (v - k exp(decay) S)` and `q S`.

    `query, key`    [num_tokens, key_heads, key_dim], with any stride between tokens.
    `value`         [num_tokens, value_heads, value_dim], with any stride between tokens.
    `decay`         [num_tokens, value_heads] or [num_tokens, value_heads, key_dim]; `beta` [num_tokens, value_heads] or
                    None, without the subtraction.
    `states`        [num_blocks, value_heads, key_dim, value_dim] float32, with any stride between blocks.
    `result`        [num_tokens, value_heads, value_dim] in value's type, contiguous.
    `program`       All tokens of one sequence, for a tile of columns of one head's S, which stays in registers.

Sums are float32, over all of key_dim in one warp. Their order depends on the tile, and the tile on shapes only: for one
network, one compiled kernel serves all steps. Oracle: `kernels.states.gated_delta_rule`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.inputs import AttentionMetadata
from kernels.triton.launch import OPTIONS
from kernels.triton.states.sequences import sequence_at

_TILE = 1024
"""Elements of a tile, 32 for each thread, with at least 8 columns: 32 bytes."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
    normalize: bool,
) -> Tensor:
    result = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    num_sequences, (num_tokens, value_heads, value_dim) = len(metadata.context_lens), value.shape
    if num_sequences and num_tokens:
        key_heads, key_dim = query.shape[1:]
        depth = triton.next_power_of_2(key_dim)
        columns = min(max(8, _TILE // depth), triton.next_power_of_2(value_dim))
        decay = decay.contiguous()
        _gated_delta_rule_kernel[(triton.cdiv(value_dim, columns), value_heads, num_sequences)](
            query, key, value, decay, decay if beta is None else beta.contiguous(), states, result,
            metadata.query_start, metadata.context_lens, metadata.block_tables,
            query.stride(0), key.stride(0), value.stride(0), states.stride(0), metadata.block_tables.stride(0),
            key_dim**-0.5,
            group=value_heads // key_heads, key_dim=key_dim, value_heads=value_heads, value_dim=value_dim,
            by_row=decay.dim() == 3, has_beta=beta is not None, normalize=normalize,
            depth=depth, columns=columns, num_warps=1, **OPTIONS,
        )  # fmt: skip
    return result


_ANY = ["query_stride", "key_stride", "value_stride", "state_stride", "table_stride"]


@triton.jit(do_not_specialize=_ANY)
def _gated_delta_rule_kernel(
    query, key, value, decay, beta, states, result, query_start, context_lens, block_tables,
    query_stride, key_stride, value_stride, state_stride, table_stride, scale,
    group: tl.constexpr, key_dim: tl.constexpr, value_heads: tl.constexpr, value_dim: tl.constexpr,
    by_row: tl.constexpr, has_beta: tl.constexpr, normalize: tl.constexpr, depth: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(2).to(tl.int64)
    first, end, block, reads, writes = sequence_at(number, query_start, context_lens, block_tables, table_stride)
    head = tl.program_id(1)
    part = tl.arange(0, depth)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    exists, inside = part < key_dim, column < value_dim
    in_state = exists[:, None] & inside[None, :]
    stored = states + block * state_stride + (head * key_dim + part)[:, None] * value_dim + column[None, :]
    state = tl.zeros([depth, columns], tl.float32)
    if reads:
        state = tl.load(stored, mask=in_state, other=0.0)
    of_key_head = head // group * key_dim + part
    for row in range(first, end):
        q = tl.load(query + row * query_stride + of_key_head, mask=exists, other=0.0).to(tl.float32)
        k = tl.load(key + row * key_stride + of_key_head, mask=exists, other=0.0).to(tl.float32)
        change = tl.load(value + row * value_stride + head * value_dim + column, mask=inside, other=0.0).to(tl.float32)
        of_head = row * value_heads + head
        if normalize:
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        q *= scale
        if by_row:
            state *= tl.exp(tl.load(decay + of_head * key_dim + part, mask=exists, other=0.0).to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(decay + of_head).to(tl.float32))
        wide_key = tl.broadcast_to(k[:, None], depth, columns)
        if has_beta:
            change = (change - tl.sum(state * wide_key, axis=0)) * tl.load(beta + of_head).to(tl.float32)
        state = tl.fma(wide_key, tl.broadcast_to(change[None, :], depth, columns), state)
        out = tl.sum(state * q[:, None], axis=0).to(result.dtype.element_ty)
        tl.store(result + of_head * value_dim + column, out, mask=inside)
    if writes:
        tl.store(stored, state, mask=in_state)
