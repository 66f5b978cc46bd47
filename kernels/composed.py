"""Operations of a decoder layer that are composed of other operations, for backends without a fused kernel for them."""

import torch
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.attention.narrow_cache import head_dim_of
from kernels.float8 import Float8Weight, product_in_16_bits
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
) -> Tensor:
    """Attention from the output of a fused QKV projection. Normalises and rotates the heads, stores the new keys and
    values, and computes attention.

    qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], query, key and value heads in this order. The
    function may overwrite qkv. norms: weights of `rms_norm` for query heads and for key heads, [head_dim] each, or
    None. eps, offset: see `rms_norm`. rotation: cosines and sines from `rotary_tables`, or None. Heads are rounded only
    once, after normalisation and rotation. layer_cache, slots: see `store_kv`. Returns [num_tokens, num_heads *
    head_dim].
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
    return ops.paged_attention(query, layer_cache, metadata, scale, window, soft_cap).flatten(1)


def pack_float8(ops: Ops, weight: Float8Weight, wide: bool = False) -> Product:
    """Pack an e4m3 weight for the product that `kernels.float8` defines. The packed weight is stored in bfloat16. The
    product is batch-invariant."""
    return product_in_16_bits(weight, ops.pack_batch_invariant, wide)
