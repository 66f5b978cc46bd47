"""Operations composed of others, for backends without a fused kernel."""

import torch
from torch import Tensor

from kernels.attention.narrow_cache import head_dim_of
from kernels.float8 import Float8Weight, product_in_16_bits
from kernels.inputs import AttentionMetadata
from kernels.ops import Ops, Product


def qkv_attention(
    ops: Ops,
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: float,
    rotation: tuple[Tensor, Tensor] | None,
    layer_cache: Tensor,
    slots: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """Attention from a fused QKV projection: normalise and rotate heads, store keys and values, attend.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], query, key, value; may be overwritten. norms: weights
    [head_dim] for query and key heads, or None. eps, offset: see `rms_norm`. rotation: from `rotary_tables`, or None.
    Heads are rounded once. layer_cache, slots: see `store_kv`; sinks, chunked: see `paged_attention`. Returns
    [num_tokens, num_heads * head_dim].
    """
    num_kv_heads, head_dim = layer_cache.shape[3], head_dim_of(layer_cache)
    heads = qkv.float().view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query, key = (
            ops.rms_norm(part, norm, eps, offset, torch.float32) for part, norm in zip((query, key), norms, strict=True)
        )
    if rotation is not None:
        ops.rotary_embedding(query, *rotation)
        ops.rotary_embedding(key, *rotation)
    query, key, value = (part.to(qkv.dtype) for part in (query, key, value))
    ops.store_kv(key, value, layer_cache, slots)
    attended = ops.paged_attention(query, layer_cache, metadata, scale, window, soft_cap, sinks=sinks, chunked=chunked)
    return attended.flatten(1)


def pack_float8(ops: Ops, weight: Float8Weight, wide: bool = False) -> Product:
    """Pack an e4m3 weight as bfloat16, for the product of `kernels.float8`. Batch-invariant."""
    return product_in_16_bits(weight, ops.pack_batch_invariant, wide)
