"""Metadata of a step for attention: each sequence's query rows, context length and blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.upload import upload

PART_KEYS = 512
"""Number of keys in a part of a context. In batch-invariant attention, the sums of each part are computed separately.
The CPU kernels use the same number (kPartKeys)."""


@dataclass(frozen=True)
class SharedParts:
    """The parts of contexts that several decodes share, because their block tables begin with the same blocks. A shared
    part is read once for all its decodes.

    If a sequence has shared parts, they are its first parts. The sequence sees all keys of its shared parts, and at
    least one key after the shared parts. Attention with a window or a bias ignores this metadata. Backends that find
    shared parts themselves also ignore this metadata.
    """

    items: Tensor
    """[any number, 3] int32. An item is a shared part with some of its sequences. Columns: the part's number, the
    item's first entry in `rows`, and the number of the item's entries. The number of entries is at most
    `Ops.shared_tokens`, and 0 for an unused item."""
    rows: Tensor
    """[any number] int32: the sequence numbers of all items, item after item."""
    num_parts: Tensor
    """[num_sequences] int32: the number of shared parts of each sequence."""
    most_parts: int
    """The largest number in `num_parts`, in host memory."""


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of a step, both prefill chunks and decodes. The metadata is built once for a step and used by all
    layers."""

    query_start: Tensor
    """[num_sequences + 1] int32: the first query row of each sequence, and at the end the number of all rows."""
    context_lens: Tensor
    """[num_sequences] int32: number of tokens in each sequence's context. The last tokens of the context are the query
    tokens."""
    block_tables: Tensor
    """[num_sequences, width] int32: block numbers. Entries after the end of a context may have any value. Entries for
    blocks that a sliding window has passed may also have any value."""
    max_query_len: int
    """The largest number of query tokens of a sequence; 0 if there are no sequences. The number is in host memory, so
    that no kernel launch waits for the device."""
    max_context_len: int
    """The largest number of context tokens of a sequence, in host memory."""
    shared: SharedParts | None = None
    """Shared parts of the sequences' contexts, or None. Only a batch in which every sequence has one query token can
    have shared parts."""

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Tensor,
        device: torch.device,
    ) -> "AttentionMetadata":
        """Build the metadata from lists in host memory. block_tables: [num_sequences, any sufficient width]
        integers."""
        return cls(
            upload(list(accumulate(query_lens, initial=0)), torch.int32, device),
            upload(context_lens, torch.int32, device),
            upload(block_tables, torch.int32, device),
            max(query_lens, default=0),
            max(context_lens, default=0),
        )
