"""The metadata that attention needs in a step: the query rows, the context length and the blocks of each sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.upload import upload

PART_KEYS = 512
"""Number of keys in a part of a context. Batch-invariant attention computes separate sums for each part of 512 keys.
The CPU kernels use the same number of keys (kPartKeys)."""


@dataclass(frozen=True)
class SharedParts:
    """The parts of contexts that several decodes share, because the decodes' block tables begin with the same blocks.
    The keys and values of a shared part are read once for all decodes that share it.

    The shared parts of a sequence are the first parts of its context. The sequence attends to all keys of its shared
    parts, and to at least one key after them. `SharedParts` is ignored by attention with a window or a bias, and by
    backends that find shared parts themselves.
    """

    items: Tensor
    """[any number, 3] int32. An item is a shared part with some of the sequences that share it. The columns are the
    part's number, the index of the item's first entry in `rows`, and the number of the item's entries in `rows`. The
    number of entries is at most `Ops.shared_tokens`, and 0 for an unused item."""
    rows: Tensor
    """[any number] int32: the numbers of each item's sequences, for one item after the other."""
    num_parts: Tensor
    """[num_sequences] int32: the number of shared parts of each sequence."""
    most_parts: int
    """The largest number in `num_parts`, as a number in host memory."""


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of a step, with one query token (decodes) or several (chunks). The metadata is built once for a
    step, and is used by all layers."""

    query_start: Tensor
    """[num_sequences + 1] int32: the number of each sequence's first query row, followed by the number of all query
    rows."""
    context_lens: Tensor
    """[num_sequences] int32: the number of tokens in each sequence's context. The last tokens of a context are the
    query tokens."""
    block_tables: Tensor
    """[num_sequences, width] int32: the numbers of each sequence's blocks. Entries after the end of a context may have
    any value. Entries for blocks before a sequence's sliding window may also have any value."""
    max_query_len: int
    """The largest number of query tokens of a sequence; 0 if there are no sequences. The number is in host memory, so
    that the host need not wait for the device to launch a kernel."""
    max_context_len: int
    """The largest number of context tokens of a sequence, as a number in host memory."""
    shared: SharedParts | None = None
    """Parts of contexts that several sequences share, or None. Only a step in which every sequence has one query token
    can have shared parts."""

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Tensor,
        device: torch.device,
    ) -> "AttentionMetadata":
        """Build the metadata of a step from lists in host memory. block_tables is [num_sequences, width] integers, wide
        enough for the longest context."""
        return cls(
            upload(list(accumulate(query_lens, initial=0)), torch.int32, device),
            upload(context_lens, torch.int32, device),
            upload(block_tables, torch.int32, device),
            max(query_lens, default=0),
            max(context_lens, default=0),
        )
