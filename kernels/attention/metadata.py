"""What attention must know of a step: each sequence's query rows, its context's length, and its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.upload import upload

PART_KEYS = 512
"""Keys that are attended to on their own where a row's sums are made by position; the CPU's kernels have as many."""


@dataclass(frozen=True)
class SharedParts:
    """Parts of a context that several decodes have, as the same blocks: attended to once for all of them.

    A sequence shares the first of its parts, all of whose keys it sees, and at least one key is behind them. Attention
    with a window or a bias, and backends that find such parts themselves, pay no heed to it.
    """

    items: Tensor
    """[any number, 3] int32: a part's number, the first of its `rows`, and how many these are, at most as many as
    `Ops.shared_tokens` says; none for an item that is not used."""
    rows: Tensor
    """[any number] int32: sequences of the items."""
    num_parts: Tensor
    """[num_sequences] int32: how many parts of each sequence are among the items."""
    most_parts: int
    """The most of any sequence, known to the host."""


@dataclass(frozen=True)
class AttentionMetadata:
    """A step's sequences, prefill chunks and decodes alike. One is built for a step and serves all layers."""

    query_start: Tensor
    """[num_sequences + 1] int32: the first query row of each sequence, and behind the last one the number of rows."""
    context_lens: Tensor
    """[num_sequences] int32: tokens that a sequence attends to; its query tokens are the last of them."""
    block_tables: Tensor
    """[num_sequences, width] int32: their blocks; entries that the context does not need, past its end or
    behind a sliding window, may be anything."""
    max_query_len: int
    """The largest of all sequences; 0 without any. It is known to the host, so nothing has to be read from a device."""
    max_context_len: int
    """Likewise."""
    shared: SharedParts | None = None
    """Only where every sequence has one query token."""

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Tensor,
        device: torch.device,
    ) -> "AttentionMetadata":
        """From lists in host memory, and block_tables: [num_sequences, any width that suffices] integers."""
        return cls(
            upload(list(accumulate(query_lens, initial=0)), torch.int32, device),
            upload(context_lens, torch.int32, device),
            upload(block_tables, torch.int32, device),
            max(query_lens, default=0),
            max(context_lens, default=0),
        )
