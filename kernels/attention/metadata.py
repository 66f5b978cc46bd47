"""Metadata of a step for attention: each sequence's query rows, context length and blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.upload import upload

PART_KEYS = 512
"""Keys of a part, whose sums are computed separately when sums depend on position; the CPU kernels use the same
number."""


@dataclass(frozen=True)
class SharedParts:
    """Parts of a context that several decodes share, in the same blocks: read once for all of them.

    A sequence shares its first parts. It sees all keys of a shared part, and at least one key after the shared parts.
    Attention with a window or a bias ignores them, and so do backends that find shared parts themselves.
    """

    items: Tensor
    """[any number, 3] int32: the part's number, the item's first entry in `rows`, and the number of its entries (0 for
    an unused item; at most `Ops.shared_tokens`)."""
    rows: Tensor
    """[any number] int32: sequences of the items."""
    num_parts: Tensor
    """[num_sequences] int32: the number of each sequence's shared parts."""
    most_parts: int
    """The largest of `num_parts`, known to the host."""


@dataclass(frozen=True)
class AttentionMetadata:
    """A step's sequences, prefill chunks and decodes alike. Built once for a step, used by all layers."""

    query_start: Tensor
    """[num_sequences + 1] int32: the first query row of each sequence, then the number of rows."""
    context_lens: Tensor
    """[num_sequences] int32: tokens that a sequence attends to; its query tokens are the last of them."""
    block_tables: Tensor
    """[num_sequences, width] int32: block numbers. Entries past the context's end or behind a sliding window may be
    anything."""
    max_query_len: int
    """The largest number of query tokens; 0 without sequences. Known to the host, so nothing is read back from a
    device."""
    max_context_len: int
    """The largest number of context tokens, known to the host."""
    shared: SharedParts | None = None
    """Set only if every sequence has one query token."""

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Tensor,
        device: torch.device,
    ) -> "AttentionMetadata":
        """From lists in host memory. block_tables: [num_sequences, any sufficient width] integers."""
        return cls(
            upload(list(accumulate(query_lens, initial=0)), torch.int32, device),
            upload(context_lens, torch.int32, device),
            upload(block_tables, torch.int32, device),
            max(query_lens, default=0),
            max(context_lens, default=0),
        )
