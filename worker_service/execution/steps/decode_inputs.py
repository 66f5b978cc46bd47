"""The inputs of a step with a CUDA graph, at fixed addresses.

Each token is one row, which attention treats as a sequence with one query token. Rows of one sequence have the same
block table, so steps that verify drafts use the kernel for decode steps.

A step is padded to a fixed batch size. A padding row (token 0, position -1, slot -1, no context, no adapter) stores and
reads no keys. Token ids, positions, context lengths and slots are one transfer, and only changed block tables are
copied. Tokens that the host has not read yet are copied within the device. Each group of layers has slots and block
tables of its own."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.inputs import AttentionMetadata, SharedParts, upload
from worker_service.execution.images.axial_positions import shifts
from worker_service.session.sequence_state import PLACEHOLDER, ScheduledChunk
from worker_service.session.step import TOKENS


@dataclass(frozen=True)
class UnseenTokens:
    """Tokens that a step has sampled and that the host has not read yet."""

    token_ids: Tensor
    """[rows] int64 on the device, negative if sampling failed. A failed sequence continues with a placeholder."""
    rows: Mapping[int, int]
    """The row of each sequence's token, by sequence id."""


def bucket_sizes(max_num_rows: int) -> list[int]:
    """Batch sizes in rows. Padding adds at most 7 rows below 40 rows, and at most a fifth above."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_rows, 32)]
    return [*(size for size in sizes if size < max_num_rows), max_num_rows]


_TOKEN, _POSITION, _CONTEXT, _SLOTS = range(4)
"""Rows of the transfer. Row 3 has the slots of the first group of layers. Other groups' slots are in the rows after it.
"""


class DecodeInputs:
    """Device buffers for steps of at most `max_num_rows` tokens."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_sizes: Sequence[int], device: torch.device) -> None:
        """block_sizes: tokens of a block in each group of layers; 0 for a group with states. Such groups need one row
        for each sequence."""
        self.sizes = bucket_sizes(max_num_rows)
        self._max_model_len = max_model_len
        self._padding = np.array([[0], [-1], [0], *[[-1]] * len(block_sizes)])
        self._rows = torch.from_numpy(np.repeat(self._padding, max_num_rows, axis=1)).to(device)
        self._tables = [_BlockTables(max_num_rows, max_model_len, size, device) for size in block_sizes]
        self._adapter_slots = torch.full((max_num_rows,), -1, dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_num_rows + 1, dtype=torch.int32, device=device)

    def size_of(self, count: int) -> int:
        """The smallest batch size for a step of `count` rows."""
        return self.sizes[bisect_left(self.sizes, count)]

    def fill(
        self, chunks: Sequence[ScheduledChunk], unseen: UnseenTokens | None = None, adapter_slots: Tensor | None = None
    ) -> int:
        """Copy the inputs of a step, after all work launched before. Returns the batch size, padding included.

        unseen: a chunk that begins with an unseen token has no further tokens. adapter_slots: [tokens] int32, see
        `CausalModel.forward`."""
        device = self._rows.device
        places = [(chunk.sequence, position) for chunk in chunks for position in range(chunk.start, chunk.stop)]
        count = len(places)
        size = self.size_of(count)
        rows = np.repeat(self._padding, size, axis=1)
        if count == len(chunks):  # one token for each chunk, as in most steps
            rows[_TOKEN, :count] = [sequence.token_ids[position] for sequence, position in places]
        else:
            rows[_TOKEN, :count] = [token_id for chunk in chunks for token_id in chunk.token_ids]
        rows[_POSITION, :count] = positions = np.array([position for _, position in places])
        if any(chunk.sequence.items for chunk in chunks):
            rows[_POSITION, :count] += shifts(places)
        rows[_CONTEXT, :count] = positions + 1
        for group, tables in enumerate(self._tables):
            of_rows = [sequence.tables[group] for sequence, _ in places]
            if tables.block_size:
                rows[_SLOTS + group, :count] = tables.slots(of_rows, positions)
            tables.update(of_rows)
        self._rows[:, :size] = upload(rows, torch.int64, device)
        if unseen is not None:
            self._take_over(unseen, [unseen.rows.get(sequence.sequence_id) for sequence, _ in places])
        if adapter_slots is not None:
            self._adapter_slots[:count] = adapter_slots
            self._adapter_slots[count:size] = -1
        return size

    def tensors(
        self, size: int, shared: SharedParts | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor], list[AttentionMetadata]]:
        """Token ids and positions of the first `size` rows, and for each group of layers slots and attention metadata.

        shared: of the first group."""
        token_ids, positions, context_lens, *places = self._rows[:, :size]
        slots = [row if tables.block_size else row[:0] for row, tables in zip(places, self._tables, strict=True)]
        metadata = [
            AttentionMetadata(
                query_start=self._query_start[: size + 1],
                context_lens=context_lens.to(torch.int32),
                block_tables=tables.blocks[:size],
                max_query_len=1,
                max_context_len=self._max_model_len,
                shared=None if group else shared,
            )
            for group, tables in enumerate(self._tables)
        ]
        return token_ids, positions, slots, metadata

    def adapter_slots(self, size: int) -> Tensor:
        """The adapter slots of the first `size` rows, [size] int32."""
        return self._adapter_slots[:size]

    def _take_over(self, unseen: UnseenTokens, sources: Sequence[int | None]) -> None:
        """sources: for each row, its token's row in `unseen`, or None if the host knows the token."""
        # Usually, sequences and their order are the same as in the previous step.
        if sources == list(range(len(unseen.token_ids))):
            torch.clamp(unseen.token_ids, min=PLACEHOLDER, out=self._rows[_TOKEN, : len(sources)])
        elif pairs := [(row, source) for row, source in enumerate(sources) if source is not None]:
            rows, places = upload(np.array(pairs).T, torch.int64, self._rows.device)
            self._rows[_TOKEN].index_copy_(0, rows, unseen.token_ids[places].clamp_(min=PLACEHOLDER))


class _BlockTables:
    """The block table of each row, in one group of layers."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        width = -(-max_model_len // block_size) if block_size else 1
        self.blocks = torch.zeros((max_num_rows, width), dtype=torch.int32, device=device)
        self._known = [array(TOKENS) for _ in range(max_num_rows)]

    def slots(self, tables: "Sequence[array[int]]", positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The slot of each row's token."""
        indices = (positions // self.block_size).tolist()
        blocks = np.array([table[index] for table, index in zip(tables, indices, strict=True)])
        slots: npt.NDArray[np.int64] = blocks * self.block_size + positions % self.block_size
        return slots

    def update(self, rows_tables: "Sequence[array[int]]") -> None:
        """Copy the tables that have changed."""
        changed = [row for row, table in enumerate(rows_tables) if table != self._known[row]]
        if not changed:
            return
        width = self.blocks.shape[1]
        tables = [rows_tables[row][:width] for row in changed]
        entries = np.zeros((len(changed), max(map(len, tables))), dtype=np.int32)
        for place, table in enumerate(tables):
            entries[place, : len(table)] = table
        device = self.blocks.device
        rows = upload(changed, torch.int64, device)
        self.blocks[:, : entries.shape[1]].index_copy_(0, rows, upload(entries, torch.int32, device))
        for row in changed:  # stored last, because earlier calls can fail
            self._known[row] = array(TOKENS, rows_tables[row])
