"""The tensors of a decode step, in the same memory every time, so that a captured CUDA graph can be replayed over them.

A batch is padded to one of a few sizes. A padding row has token 0, position -1 and slot -1, and therefore stores
nothing and attends to nothing. Tokens, positions and slots cross to the device in one copy a step. A row's block table
crosses only if the row's sequence or its blocks have changed since the last step that used the row. A token that the
previous step sampled stays on the device: the host need not have read it.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.upload import upload
from worker_service.session.session import PLACEHOLDER, ScheduledChunk
from worker_service.session.step import TOKENS


@dataclass(frozen=True)
class UnseenTokens:
    """What a step has sampled and the host has not read yet."""

    token_ids: Tensor
    """[rows] int64, negative for sequences that failed, which go on from a placeholder."""
    rows: Mapping[int, int]
    """By sequence id."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """A few sizes. From 40 sequences on, the next size is at most a fifth larger; below, at most 7 rows larger."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


_PADDING_ROW = np.array([[0], [-1], [-1]])
"""Token, position and slot."""


class DecodeInputs:
    """Room for `max_num_seqs` sequences of one new token each."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.sizes = bucket_sizes(max_num_seqs)
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._rows = torch.from_numpy(np.repeat(_PADDING_ROW, max_num_seqs, axis=1)).to(device)
        self._query_start = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=torch.int32, device=device)
        self._known_tables = [array(TOKENS) for _ in range(max_num_seqs)]

    def fill(self, chunks: Sequence[ScheduledChunk], unseen: UnseenTokens | None = None) -> int:
        """Take a step's chunks of one token each; tokens in `unseen` are on the device only.

        Returns the size of the bucket that they fit. The copies run after all work that the device was given before.
        """
        count, block_size, device = len(chunks), self._block_size, self._rows.device
        size = self.sizes[bisect_left(self.sizes, count)]
        rows = np.repeat(_PADDING_ROW, size, axis=1)
        rows[0, :count] = [sequence.token_ids[start] for sequence, start, *_ in chunks]
        rows[1, :count] = positions = [chunk.start for chunk in chunks]
        blocks = [sequence.block_ids[start // block_size] for sequence, start, *_ in chunks]
        rows[2, :count] = np.array(blocks) * block_size + np.array(positions) % block_size
        self._rows[:, :size] = upload(rows, torch.int64, device)
        if unseen is not None:
            self._take_over(unseen, [unseen.rows.get(chunk.sequence.sequence_id) for chunk in chunks])
        self._update_tables(chunks)
        return size

    def tensors(self, size: int) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Token ids, positions, slots and what attention must know, of the first `size` rows."""
        token_ids, positions, slots = self._rows[:, :size]
        metadata = AttentionMetadata(
            query_start=self._query_start[: size + 1],
            context_lens=(positions + 1).to(torch.int32),
            block_tables=self._tables[:size],
            max_query_len=1,
            max_context_len=self._max_model_len,
        )
        return token_ids, positions, slots, metadata

    def _take_over(self, unseen: UnseenTokens, sources: Sequence[int | None]) -> None:
        """sources: for each row, the row of its token in `unseen`; None if the host knows the token."""
        if sources == list(range(len(unseen.token_ids))):  # as in most steps
            torch.clamp(unseen.token_ids, min=PLACEHOLDER, out=self._rows[0, : len(sources)])
        elif pairs := [(row, source) for row, source in enumerate(sources) if source is not None]:
            rows, places = upload(np.array(pairs).T, torch.int64, self._rows.device)
            self._rows[0].index_copy_(0, rows, unseen.token_ids[places].clamp_(min=PLACEHOLDER))

    def _update_tables(self, chunks: Sequence[ScheduledChunk]) -> None:
        changed = [row for row, chunk in enumerate(chunks) if chunk.sequence.block_ids != self._known_tables[row]]
        if not changed:
            return
        width = self._tables.shape[1]
        tables = [chunks[row].sequence.block_ids[:width] for row in changed]
        entries = np.zeros((len(changed), max(map(len, tables))), dtype=np.int32)
        for place, table in enumerate(tables):
            entries[place, : len(table)] = table
        device = self._tables.device
        rows = upload(changed, torch.int64, device)
        self._tables[:, : entries.shape[1]].index_copy_(0, rows, upload(entries, torch.int32, device))
        for row in changed:  # once nothing can fail any more
            self._known_tables[row] = array(TOKENS, chunks[row].sequence.block_ids)
