"""The operations of a decoder layer in eager torch. These functions run on every device, and are the oracle with which
tests compare the faster kernels.

The KV cache has the shape `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, with keys at index 0 and
values at index 1 of the third dimension. The keys and values of all layers in one block are contiguous, so moving a
block is one copy. The argument `layer_cache` is the strided view `cache[:, layer]`. A slot is the place of a token in
the cache, `block * block_size + offset`.
"""

import sys
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels import composed
from kernels.attention.metadata import AttentionMetadata
from kernels.attention.narrow_cache import is_narrow, narrowed, widened
from kernels.attention.options import check_attention_options
from kernels.float8 import FLOAT8
from kernels.linear.experts import combine_rows as combine_rows
from kernels.linear.experts import grouped_float8 as grouped_float8
from kernels.linear.experts import grouped_linear as grouped_linear
from kernels.linear.experts import pack_batch_invariant as pack_batch_invariant
from kernels.ops import GroupedWeight, LoraWeights, Ops, Product, Table

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""The activation functions that `gated_activation` supports."""

WIDE_PRODUCTS = False
GROUPED_PRODUCTS = False


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm: `x / sqrt(mean(x²) + eps) * (weight + offset)` over the last dimension, computed in float32. (Zhang and
    Sennrich, 2019.)

    x is [..., hidden_size] with any strides, in the weight's dtype or float32. weight is [hidden_size]. dtype: the
    dtype of the result; the default is the weight's dtype. The result is contiguous and has the shape of x. `offset` is
    1 for Gemma, whose checkpoints store norm weights reduced by 1.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.float() + offset)).to(dtype or weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Add x to `residual` in place, and return the `rms_norm` of the sum, in the weight's dtype.

    x is [num_tokens, hidden_size], in the weight's dtype or float32. residual is [num_tokens, hidden_size] in float32,
    so that the residual stream is not rounded to 16 bits in each layer.
    """
    residual += x
    return rms_norm(residual, weight, eps, offset)


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The cosines and sines for rotary embeddings: cosines and sines of `position * inverse_frequency` radians, times
    `scale`.

    positions is [num_tokens] integers; inverse_frequencies is [rotary_dim / 2] float32. Returns two float32 tensors
    [num_tokens, rotary_dim / 2]. All layers with equal rotary embeddings use the same two tensors in a step.
    """
    angles = positions.float()[:, None] * inverse_frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary embeddings in place: rotate each pair (x[i], x[i + rotary_dim/2]) of every head by the pair's angle,
    computed in float32.

    x is [num_tokens, num_heads, head_dim], with any stride between tokens. cos, sin: from `rotary_tables`. If
    rotary_dim is less than head_dim, the remaining elements of a head are unchanged. (Su et al., 2021; the pairs are
    those of GPT-NeoX.)
    """
    rotated = x[..., : 2 * cos.shape[1]]
    first, second = rotated.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def store_kv(keys: Tensor, values: Tensor, layer_cache: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens into the tokens' slots of the cache.

    keys and values are [num_tokens, num_kv_heads, head_dim], with any stride between tokens. layer_cache is
    [num_blocks, 2, block_size, num_kv_heads, head_dim], or an 8-bit cache (see `kernels.attention.narrow_cache`). The
    compiled CPU kernels support a cache in int8, but not in e4m3. slots is [num_tokens] int64, without duplicates.
    """
    if is_narrow(layer_cache.dtype):
        keys, values = narrowed(keys, layer_cache.dtype), narrowed(values, layer_cache.dtype)
    block_size = layer_cache.shape[2]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    layer_cache[blocks, 0, offsets] = keys
    layer_cache[blocks, 1, offsets] = values


def paged_attention(
    query: Tensor,
    layer_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Paged attention, `softmax(q kᵀ * scale) v`: each query token attends to the tokens of its sequence up to itself.
    (Kwon et al., 2023.)

    query is [num_tokens, num_heads, head_dim], with any stride between tokens. layer_cache: see `store_kv`. The keys
    and values of the query tokens must already be stored. num_heads is a multiple of num_kv_heads, and consecutive
    query heads share a key head. If `window` is given, a token attends to `window` tokens, including itself. If
    `soft_cap` is given, scores become `soft_cap * tanh(score / soft_cap)` (Gemma Team, 2024). The result is contiguous,
    and has the shape and dtype of query. Slots outside the blocks of a sequence do not affect the sequence's result,
    even if they contain NaN. Blocks that lie before the windows of all query tokens may belong to other sequences.

    bias: a relative position bias (Raffel et al., 2020) that is added to the scaled scores, [num_heads, num_distances]
    float32, contiguous. Entry d of a head's bias applies to the key that is d tokens before the query token. The last
    entry also applies to all larger distances.

    If `causal` is false, each query token attends to all `context_lens` tokens in its sequence's blocks. There must be
    at least one context token, and there may be more query tokens than context tokens. A decoder's cross-attention to
    the encoder's tokens is not causal. `check_attention_options` checks whether the options may be combined.
    """
    check_attention_options(query, window, soft_cap, bias, causal)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts, block_size = metadata.query_start.tolist(), layer_cache.shape[2]
    groups = query.shape[1] // layer_cache.shape[3]
    for row, context_len in enumerate(metadata.context_lens.tolist()):
        start, stop = starts[row], starts[row + 1]
        computed = context_len - (stop - start)
        first_block = 0 if window is None else max(0, computed - window + 1) // block_size
        blocks = layer_cache[metadata.block_tables[row, first_block : -(-context_len // block_size)].long()]
        if is_narrow(blocks.dtype):
            blocks = widened(blocks, query.dtype)
        positions = torch.arange(first_block * block_size, context_len, device=query.device)
        keys, values = (
            blocks[:, part].flatten(0, 1)[: len(positions)].transpose(0, 1).repeat_interleave(groups, dim=0)
            for part in (0, 1)
        )
        if causal:
            distance = torch.arange(computed, context_len, device=query.device)[:, None] - positions
        else:
            distance = torch.zeros((stop - start, context_len), dtype=torch.int64, device=query.device)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        added = None if bias is None else bias[:, distance.clamp(0, bias.shape[1] - 1)]
        output[start:stop] = _attend(
            query[start:stop].transpose(0, 1), keys, values, visible, scale, soft_cap, added
        ).transpose(0, 1)
    return output


qkv_attention = partial(composed.qkv_attention, cast(Ops, sys.modules[__name__]))


def gated_activation(x: Tensor, activation: str) -> Tensor:
    """The gated activation: computes `activation(gate) * up` in float32, from the output of the fused gate and up
    projections. (Shazeer, 2020.)

    x is [..., 2 * n], the gate followed by up. activation: a name in `ACTIVATIONS`. Returns [..., n].
    """
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        activated = functional.silu(gate)
    else:
        activated = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (activated * up).to(x.dtype)


def add_lora(y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> None:
    """Add the output of each row's adapter, `(x @ a.T) @ b`, to the output y of a linear layer, in place. Sums are
    float32. (Hu et al., 2021.)

    y is [rows, outputs], in x's dtype or float32. x is [rows, inputs]. slots is [rows] int32, the slot of each row's
    adapter, or a negative number for a row without an adapter. The rows of a batch may have different adapters, as in
    Punica (Chen et al., 2023).
    """
    for slot in set(slots.tolist()):
        if slot < 0 or not (rank := int(weights.ranks[slot])):
            continue
        rows = (slots == slot).nonzero().flatten()
        wide = x[rows].float()
        added = [
            wide @ weights.a[slot, part, :rank].float().T @ weights.b[slot, :rank, start:stop].float()
            for part, (start, stop) in enumerate(pairwise(weights.starts))
        ]
        y[rows] = (y[rows].float() + torch.cat(added, dim=1)).to(y.dtype)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.T + bias` with a float32 result, for x and weight of any type. x is [rows, inputs]; weight is
    [outputs, inputs]."""
    if x.device.type != "cuda" or x.dtype is torch.float32:
        return functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = torch.mm(x, weight.T, out_dtype=torch.float32)
    return product if bias is None else product.add_(bias)


def pack(weight: Tensor, wide: bool = False) -> Product | None:
    """Pack a weight matrix. Returns a `kernels.ops.Product` that is faster than torch's `linear`, or None if there is
    no faster product.

    weight is [outputs, inputs]. wide: whether the product's result is in float32 instead of the dtype of x.

    The eager version of `pack` uses oneDNN's packed layout for bf16 weights. With this layout, products of 1 to 32 rows
    take 33 to 75 % of the time of torch's `linear`, with equal bits. oneDNN cannot return float32 for this layout. On a
    CPU, the weight is therefore stored in float32 if `wide` is true.
    """
    if wide and weight.device.type == "cpu" and weight.dtype is not torch.float32:
        widened = weight.float()
        return lambda x, bias: wide_linear(x, widened, bias)
    if wide or not (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def wide_itemsize(dtype: torch.dtype) -> int:  # noqa: ARG001 (others use it)
    """Number of bytes of an element in the weight copy that `pack` makes on a CPU if `wide` is true. dtype: the
    weight's dtype."""
    return torch.float32.itemsize


def pack_int8(weight: Tensor, wide: bool = False) -> Product | None:  # noqa: ARG001 (others use it)
    """Like `pack`, with the weight quantised to int8, which halves the weight's memory. Returns None if a product with
    an int8 weight would not be faster."""
    return None


def pack_int4(weight: Tensor, wide: bool = False) -> Product | None:  # noqa: ARG001 (others use it)
    """Like `pack`, with the weight quantised to 4 bits and x quantised to 8 bits. Returns None if a product with a
    4-bit weight would not be faster."""
    return None


def pack_w8a8(weight: Tensor, wide: bool = False) -> Table | None:  # noqa: ARG001 (others use it)
    """Like `pack`, with the weight and x quantised to 8 bits. Returns None if a product of 8-bit integers would not be
    faster."""
    return None


def pack_grouped(weight: GroupedWeight, wide: bool = False) -> Table | None:  # noqa: ARG001 (others use it)
    """Like `pack_int4`, for a weight that is already quantised. Returns None if a product with such a weight would not
    be faster."""
    return None


pack_float8 = partial(composed.pack_float8, cast(Ops, sys.modules[__name__]))


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks, with all layers, within the cache. All sources are read before any destination is written.

    cache is [num_blocks, ...]. sources and destinations are [n] int64, block numbers. No block may be in `destinations`
    twice.
    """
    if cache.dtype is FLOAT8:
        cache = cache.view(torch.int8)  # torch cannot copy e4m3
    cache.index_copy_(0, destinations, cache.index_select(0, sources))


def shared_tokens(groups: int, head_dim: int, dtype: torch.dtype) -> int:  # noqa: ARG001 (others use them)
    """Maximum number of decodes for which a part in `metadata.shared` is computed together. The result is 0 if the
    kernels do not use `metadata.shared`, because they find shared keys themselves or compute each decode separately.
    groups: number of query heads that share a key head."""
    return 0


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
    bias: Tensor | None,
) -> Tensor:
    """Compute attention of one sequence. query is [heads, n, head_dim]; keys and values are [heads, context, head_dim];
    visible is [n, context] bool; bias is [heads, n, context] float32."""
    if soft_cap is None and bias is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
    scores = query.float() @ keys.float().transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill_(~visible, -torch.inf)
    return (scores.softmax(dim=-1) @ values.float()).to(query.dtype)
