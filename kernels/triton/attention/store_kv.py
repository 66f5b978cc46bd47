"""Stores keys and values: `layer_cache[slot // block_size, :, slot % block_size] = key, value`.

    `keys, values`   [num_tokens, num_kv_heads, head_dim], with any stride between tokens.
    `layer_cache`    [num_blocks, 2, block_size, num_kv_heads, head_dim], a strided view of one layer. May be in 8 bits.
                     If the second dimension is 1, only keys are stored.
    `program`        One token, whose heads are contiguous in the source and in the cache.

Negative slots, a CUDA graph's padding rows, are not stored; eager torch would have to read the slots on the host.
Oracle: `kernels.reference.store_kv`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.narrow_cache import scale_bytes_of, store_heads
from kernels.triton.launch import OPTIONS, num_warps


def store_kv(keys: Tensor, values: Tensor, layer_cache: Tensor, slots: Tensor) -> None:
    num_tokens, num_kv_heads, head_dim = keys.shape
    if num_tokens == 0:
        return
    heads, columns = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_dim)
    _store_kv_kernel[(num_tokens,)](
        keys,
        values,
        layer_cache,
        slots,
        keys.stride(0),
        values.stride(0),
        layer_cache.stride(0),
        layer_cache.stride(1),
        stores_values=layer_cache.shape[1] == 2,
        block_size=layer_cache.shape[2],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale_bytes=scale_bytes_of(layer_cache),
        heads=heads,
        columns=columns,
        num_warps=num_warps(2 * heads * columns),
        **OPTIONS,
    )


@triton.jit
def _store_kv_kernel(
    keys,
    values,
    layer_cache,
    slots,
    key_stride,
    value_stride,
    block_stride,
    part_stride,
    stores_values: tl.constexpr,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    scale_bytes: tl.constexpr,
    heads: tl.constexpr,
    columns: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.arange(0, heads)[:, None]
        column = tl.arange(0, columns)[None, :]
        exists = head < num_kv_heads
        inside = exists & (column < head_dim)
        stored: tl.constexpr = head_dim + scale_bytes
        place = layer_cache + slot // block_size * block_stride + (slot % block_size * num_kv_heads + head) * stored
        source = head * head_dim + column
        key = tl.load(keys + token * key_stride + source, mask=inside, other=0.0)
        store_heads(place, column, key, inside, exists, head_dim, scale_bytes)
        if stores_values:
            value = tl.load(values + token * value_stride + source, mask=inside, other=0.0)
            store_heads(place + part_stride, column, value, inside, exists, head_dim, scale_bytes)
