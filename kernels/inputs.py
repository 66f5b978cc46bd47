"""Inputs of the operations: numbers on the device, angles of positions, and the sequences of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

PART_KEYS = 512
"""Keys of a part. Batch-invariant attention sums each part separately. The CPU kernels' equal is kPartKeys."""


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """numbers: lists, a tensor on the host, or a numpy array. A GPU copies from pinned memory; from other memory, the
    host would wait for the GPU's current work."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `position * inverse_frequency` radians, times `scale`. positions: [num_tokens] integers, or
    [num_tokens, rotary_dim / 2] if they differ between frequencies. inverse_frequencies: [rotary_dim / 2] float32.
    Returns two [num_tokens, rotary_dim / 2] float32, for all layers with equal rotary embeddings."""
    angles = (positions[:, None] if positions.dim() == 1 else positions).float() * inverse_frequencies
    return angles.cos() * scale, angles.sin() * scale


@dataclass(frozen=True)
class SharedParts:
    """The parts of contexts that several decodes share; their keys and values are read once. Shared parts are a
    context's first, with at least one key after them. Attention with window or bias ignores them, and so do backends
    that find shared keys themselves."""

    items: Tensor
    """[items, 3] int32: the part's number, the item's first entry in `rows`, and its number of entries, at most
    `Ops.shared_tokens` and 0 if unused."""
    rows: Tensor
    """[entries] int32: each item's sequences, item after item."""
    num_parts: Tensor
    """[num_sequences] int32."""
    most_parts: int
    """Maximum of `num_parts`, in host memory."""


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of a step, with one query token (decodes) or several (chunks). Built once for all layers."""

    query_start: Tensor
    """[num_sequences + 1] int32: each sequence's first query row, then the number of all rows."""
    context_lens: Tensor
    """[num_sequences] int32: tokens of each context, which ends with the query tokens."""
    block_tables: Tensor
    """[num_sequences, width] int32. Entries after a context's end or before its window may have any value."""
    max_query_len: int
    """Maximum, in host memory, so that a launch need not wait for the device; 0 without sequences."""
    max_context_len: int
    """Maximum, in host memory."""
    shared: SharedParts | None = None
    """Only if every sequence has one query token."""
    visible_ends: Tensor | None = None
    """[query tokens] int32: the last position that each query token attends to, at least its own, and in its context.
    None: its own. The first position of a window does not change. Not supported with attention that is not causal or
    that is chunked, with a bias, and by Triton's kernel of latents."""

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Tensor,
        device: torch.device,
        visible_ends: Sequence[int] | Any | None = None,
    ) -> "AttentionMetadata":
        """block_tables: [num_sequences, width] integers, wide enough for the longest context."""
        return cls(
            upload(list(accumulate(query_lens, initial=0)), torch.int32, device),
            upload(context_lens, torch.int32, device),
            upload(block_tables, torch.int32, device),
            max(query_lens, default=0),
            max(context_lens, default=0),
            visible_ends=None if visible_ends is None else upload(visible_ends, torch.int32, device),
        )
