"""Registers attention for vision networks in transformers under the name `NAME`.

In bfloat16 on a CPU, the decoder's kernels compute it: 1,024 patches of 12 heads take 0.6 of the time of torch's
attention (two loaded cores with AVX-512 bf16).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels import reference
from kernels.backends import ops_for
from kernels.inputs import AttentionMetadata

NAME = "pagewire_images"
"""`attn_implementation` of networks."""

_BLOCK = 128
"""Keys of a block. Other sizes take the same time."""
_HEAD_DIMS = range(16, 257, 16)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query, key, value: [1, heads, patches, head_dim]. Returns [1, patches, heads, head_dim], and None in place of
    weights."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    same = query.shape[2:] == key.shape[2:] == value.shape[2:]
    fits = query.shape[0] == 1 and query.shape[3] in _HEAD_DIMS and same
    fits &= query.dtype == torch.bfloat16 and query.device.type == "cpu" and ops_for(query.device) is not reference
    if not fits or causal or attention_mask is not None:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **others
        )
        return attended, None
    number, head_dim = query.shape[2:]
    ops, blocks = ops_for(query.device), -(-number // _BLOCK)
    cache = query.new_zeros(blocks, 2, _BLOCK, key.shape[1], head_dim)
    rows = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
    ops.store_kv(rows[1], rows[2], cache, torch.arange(number))
    metadata = AttentionMetadata.build([number], [number], torch.arange(blocks)[None], query.device)
    scale = head_dim**-0.5 if scaling is None else scaling
    return ops.paged_attention(rows[0], cache, metadata, scale, causal=False)[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
