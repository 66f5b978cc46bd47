"""Operations on the states of sequences, in eager torch. Tests compare the kernels with them. Layers with states keep a
state of fixed size in place of keys and values.

A sequence has its state in one block, `metadata.block_tables[:, 0]`. Operations advance it in place by the query
tokens, one after another. If the context begins with the query tokens, the state begins as zeros, whatever the block
contains. `states` is [num_blocks, ...], contiguous but for the stride of blocks. Other tensors of [num_tokens, ...] may
have any stride between tokens; results are contiguous. Only blocks of sequences with query tokens are read or
written."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kernels.inputs import AttentionMetadata


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
    activation: str | None,
) -> Tensor:
    """Causal convolution of each channel, `sum(weight[:, j] * x[t - K + 1 + j]) + bias`, in float32. x: [num_tokens,
    channels]. weight: [channels, K], bias: [channels]; in x's dtype or float32. states: [num_blocks, channels, K - 1]
    in x's dtype, the last inputs. activation: "silu" or None."""
    check_activation(activation)
    output, taps = torch.empty(x.shape, dtype=x.dtype, device=x.device), weight.shape[1]
    for rows, state in _sequences(states, metadata):
        inputs = torch.cat((state, x[rows].T), dim=1)
        sums = (inputs.unfold(1, taps, 1).float() * weight.float()[:, None]).sum(-1).T
        if bias is not None:
            sums = sums + bias.float()
        output[rows] = (functional.silu(sums) if activation == "silu" else sums).to(x.dtype)
        state.copy_(inputs[:, inputs.shape[1] - taps + 1 :])
    return output


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
    """Linear attention, `S = exp(decay) S + kᵀ beta (v - k exp(decay) S)` and `q S` (Yang et al., 2024), in float32.

    query, key: [num_tokens, key_heads, key_dim]. value: [num_tokens, value_heads, value_dim], whose consecutive heads
    share a key head. decay: [num_tokens, value_heads], or [num_tokens, value_heads, key_dim] for each row of S (Kimi
    Team, 2025); float32, at most 0. beta: [num_tokens, value_heads]; None: `S = exp(decay) S + kᵀ v`, as in Lightning
    attention (Qin et al., 2024). states: [num_blocks, value_heads, key_dim, value_dim] float32. normalize: whether to
    scale queries and keys to length 1. Queries are scaled by key_dim ** -0.5. Returns [num_tokens, value_heads,
    value_dim]."""
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    wide_query, wide_key = query.float(), key.float()
    if normalize:
        wide_query, wide_key = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (wide_query, wide_key)
        )
    wide_query = wide_query * query.shape[-1] ** -0.5
    groups = value.shape[1] // query.shape[1]
    wide_query, wide_key = (x.repeat_interleave(groups, dim=1)[..., None] for x in (wide_query, wide_key))
    factors = decay.float().exp()[..., None]
    if decay.dim() == 2:
        factors = factors[..., None]
    for rows, state in _sequences(states, metadata):
        for row in range(rows.start, rows.stop):
            state.mul_(factors[row])
            change = value[row].float()
            if beta is not None:
                change = (change - (state * wide_key[row]).sum(-2)) * beta[row].float()[:, None]
            state.add_(wide_key[row] * change[:, None])
            output[row] = (state * wide_query[row]).sum(-2).to(value.dtype)
    return output


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    """State space model of Mamba-2 (Dao and Gu, 2024), `S = exp(dt A) S + dt x Bᵀ` and `S C + D x`, in float32.

    x: [num_tokens, heads, size]. dt: [num_tokens, heads] or [num_tokens, heads, size], after bias, softplus and limits.
    a: [heads], or [heads, size, columns] for each number of S; negative. b, c: [num_tokens, groups, columns] in x's
    dtype; consecutive heads share a group. d: [heads], [heads, size] or None. states: [num_blocks, heads, size,
    columns] float32. Mamba (Gu and Dao, 2023) has one head. Returns [num_tokens, heads, size]."""
    output, heads = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[1]
    wide, wide_dt = x.float(), dt.float() if dt.dim() == 3 else dt.float()[..., None]
    wide_b, wide_c = (part.float().repeat_interleave(heads // b.shape[1], dim=1)[:, :, None] for part in (b, c))
    wide_a = a.float() if a.dim() == 3 else a.float()[:, None, None]
    skip = None if d is None else wide * (d.float() if d.dim() == 2 else d.float()[:, None])
    for rows, state in _sequences(states, metadata):
        for row in range(rows.start, rows.stop):
            state.mul_((wide_dt[row, ..., None] * wide_a).exp())
            state.add_((wide_dt[row] * wide[row])[..., None] * wide_b[row])
            result = (state * wide_c[row]).sum(-1)
            output[row] = (result if skip is None else result + skip[row]).to(x.dtype)
    return output


def check_activation(activation: str | None) -> None:
    """Raises ValueError unless `short_convolution` has this activation."""
    if activation not in (None, "silu"):
        raise ValueError(f"short convolutions have the activation silu or none, not {activation}")


def _sequences(states: Tensor, metadata: AttentionMetadata) -> Iterator[tuple[slice, Tensor]]:
    """Rows and state of each sequence with query tokens; zeros if the context begins with them."""
    starts, blocks = metadata.query_start.tolist(), metadata.block_tables[:, :1].flatten().tolist()
    for number, context_len in enumerate(metadata.context_lens.tolist()):
        rows = slice(starts[number], starts[number + 1])
        if rows.start == rows.stop:
            continue
        state = states[blocks[number]]
        if context_len == rows.stop - rows.start:
            state.zero_()
        yield rows, state
