"""Causal convolution of each channel: `sum(weight[:, j] * x[t - taps + 1 + j]) + bias`, then maybe silu.

    `x`         [num_tokens, channels], with any stride between tokens.
    `weight`    [channels, taps]; `bias` [channels] or None. In x's type or in float32.
    `states`    [num_blocks, channels, taps - 1] in x's type, with any stride between blocks: the last inputs.
    `result`    [num_tokens, channels], contiguous.
    `program`   Some tiles of tokens of one sequence by channels.

Sums are float32, in the order of the taps. Only the program with a sequence's first tile reads its state, and writes it
at the end. Oracle: `kernels.states.short_convolution`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.inputs import AttentionMetadata
from kernels.states import check_activation
from kernels.triton.launch import OPTIONS
from kernels.triton.states.sequences import sequence_at

_TOKENS, _CHANNELS = 16, 128
_PROGRAMS = 16
"""Maximum for a sequence and a tile of channels. With one for each tile of the longest sequence, most programs of a
step of one prompt and many decodes would have no tokens."""


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
    activation: str | None,
) -> Tensor:
    check_activation(activation)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_sequences, (num_tokens, channels), taps = len(metadata.context_lens), x.shape, weight.shape[1]
    if num_sequences and num_tokens:
        # A sequence with fewer tokens than its state has one tile, which reads and writes the state.
        tokens = min(triton.next_power_of_2(metadata.max_query_len), max(_TOKENS, triton.next_power_of_2(taps)))
        tile = min(_CHANNELS, triton.next_power_of_2(channels))
        programs = min(_PROGRAMS, triton.cdiv(metadata.max_query_len, tokens))
        _short_convolution_kernel[(programs, triton.cdiv(channels, tile), num_sequences)](
            x, weight, weight if bias is None else bias, states, result,
            metadata.query_start, metadata.context_lens, metadata.block_tables,
            x.stride(0), states.stride(0), metadata.block_tables.stride(0),
            taps=taps, channels=channels, has_bias=bias is not None, silu=activation == "silu",
            tokens=tokens, tile=tile, num_warps=max(1, tokens * tile // 512), **OPTIONS,
        )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["x_stride", "state_stride", "table_stride"])
def _short_convolution_kernel(
    x, weight, bias, states, result, query_start, context_lens, block_tables, x_stride, state_stride, table_stride,
    taps: tl.constexpr, channels: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr,
    tokens: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(2).to(tl.int64)
    first, end, block, reads, writes = sequence_at(number, query_start, context_lens, block_tables, table_stride)
    kept: tl.constexpr = taps - 1
    channel = tl.program_id(1) * tile + tl.arange(0, tile)
    exists = channel < channels
    state = states + block * state_stride + channel * kept
    for start in range(tl.program_id(0) * tokens, end - first, tl.num_programs(0) * tokens):
        place = start + tl.arange(0, tokens)
        inside = (first + place < end)[:, None] & exists[None, :]
        sums = tl.zeros([tokens, tile], tl.float32)
        for tap in tl.static_range(taps):
            source = (place + (tap - kept))[:, None]
            numbers = tl.load(
                x + (first + source) * x_stride + channel[None, :], mask=inside & (source >= 0), other=0.0
            )
            if reads & (start == 0) & (tap < kept):
                before = tl.load(state[None, :] + source + kept, mask=inside & (source < 0), other=0.0)
                numbers = tl.where(source < 0, before, numbers)
            factor = tl.load(weight + channel * taps + tap, mask=exists, other=0.0).to(tl.float32)
            sums = tl.fma(numbers.to(tl.float32), tl.broadcast_to(factor[None, :], tokens, tile), sums)
        if has_bias:
            sums += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
        if silu:
            sums = sums / (1.0 + tl.exp(-sums))
        places = result + (first + place)[:, None] * channels + channel[None, :]
        tl.store(places, sums.to(result.dtype.element_ty), mask=inside)
    if (tl.program_id(0) == 0) & writes:
        for index in tl.static_range(kept):
            source = end - first - kept + index
            if source >= 0:
                moved = tl.load(x + (first + source) * x_stride + channel, mask=exists, other=0.0)
            elif reads:
                moved = tl.load(state + source + kept, mask=exists, other=0.0)
            else:
                moved = tl.zeros([tile], x.dtype.element_ty)
            # Inputs move towards the state's beginning, so all threads have read this place before it is written.
            tl.debug_barrier()
            tl.store(state + index, moved, mask=exists)
