"""The small operations of a decoder layer in eager torch: the oracle that faster kernels are held against.

The KV cache is block-major, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`: the keys (0) and values
(1) of all layers of one block lie together, so that moving a block is one contiguous copy. A `layer_cache` is the
strided view `cache[:, layer]`. A slot is a token's place in the cache: `block * block_size + offset`.
"""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; the division is done in float32.

    x: [..., hidden_size]; weight: [hidden_size]; returns the shape and dtype of x. (Zhang and Sennrich, 2019.)
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `position * inverse_frequency` radians, times `scale`.

    positions: [num_tokens] integers; inverse_frequencies: [head_dim / 2] float32; returns two float32 tensors
    [num_tokens, 1, head_dim / 2] that serve every layer of a step.
    """
    angles = positions.float()[:, None, None] * inverse_frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pair (x[i], x[i + head_dim/2]) of every head by its angle. (Su et al., 2021; halves as in GPT-NeoX.)

    x: [num_tokens, num_heads, head_dim]; cos, sin: from `rotary_tables`; returns the shape and dtype of x. The
    products are made in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused projection. x: [..., 2 * n] is gate then up; returns [..., n]. (Shazeer, 2020.)"""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def store_kv(keys: Tensor, values: Tensor, layer_cache: Tensor, slots: Tensor) -> None:
    """Write new keys and values into the cache slots of their tokens, in place.

    keys, values: [num_tokens, num_kv_heads, head_dim]; layer_cache: [num_blocks, 2, block_size, num_kv_heads,
    head_dim]; slots: [num_tokens] int64, no slot twice.
    """
    block_size = layer_cache.shape[2]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    layer_cache[blocks, 0, offsets] = keys
    layer_cache[blocks, 1, offsets] = values


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks, all layers at once, in place. Every source is read before any destination is written.

    cache: [num_blocks, ...]; sources, destinations: [n] int64, no destination twice.
    """
    cache.index_copy_(0, destinations, cache.index_select(0, sources))
