"""The inputs of a step with a CUDA graph, at fixed addresses.

Each token is one row, which attention treats as a sequence with one query token. Rows of one sequence have the same
block table, so steps that verify drafts use the kernel for decode steps.

A step is padded to a fixed batch size. A padding row (token 0, position -1, slot -1, no context, no adapter) stores and
reads no keys. Token ids, positions, slots and context lengths are one transfer, and only changed block tables are
copied. Tokens that the host has not read yet are copied within the device."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
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


_PADDING_ROW = np.array([[0], [-1], [-1], [0]])
"""Token id, position, slot and context length."""


class DecodeInputs:
    """Device buffers for steps of at most `max_num_rows` tokens."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.sizes = bucket_sizes(max_num_rows)
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._rows = torch.from_numpy(np.repeat(_PADDING_ROW, max_num_rows, axis=1)).to(device)
        self._adapter_slots = torch.full((max_num_rows,), -1, dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_num_rows + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_num_rows, -(-max_model_len // block_size)), dtype=torch.int32, device=device)
        self._known_tables = [array(TOKENS) for _ in range(max_num_rows)]

    def size_of(self, count: int) -> int:
        """The smallest batch size for a step of `count` rows."""
        return self.sizes[bisect_left(self.sizes, count)]

    def fill(
        self, chunks: Sequence[ScheduledChunk], unseen: UnseenTokens | None = None, adapter_slots: Tensor | None = None
    ) -> int:
        """Copy the inputs of a step, after all work launched before. Returns the batch size, padding included.

        unseen: a chunk that begins with an unseen token has no further tokens. adapter_slots: [tokens] int32, see
        `CausalModel.forward`."""
        block_size, device = self._block_size, self._rows.device
        places = [(chunk.sequence, position) for chunk in chunks for position in range(chunk.start, chunk.stop)]
        count = len(places)
        size = self.size_of(count)
        rows = np.repeat(_PADDING_ROW, size, axis=1)
        if count == len(chunks):  # one token for each chunk, as in most steps
            rows[0, :count] = [sequence.token_ids[position] for sequence, position in places]
        else:
            rows[0, :count] = [token_id for chunk in chunks for token_id in chunk.token_ids]
        rows[1, :count] = positions = [position for _, position in places]
        if any(chunk.sequence.items for chunk in chunks):
            rows[1, :count] += shifts(places)
        rows[3, :count] = np.array(positions) + 1
        blocks = [sequence.block_ids[position // block_size] for sequence, position in places]
        rows[2, :count] = np.array(blocks) * block_size + np.array(positions) % block_size
        self._rows[:, :size] = upload(rows, torch.int64, device)
        if unseen is not None:
            self._take_over(unseen, [unseen.rows.get(sequence.sequence_id) for sequence, _ in places])
        if adapter_slots is not None:
            self._adapter_slots[:count] = adapter_slots
            self._adapter_slots[count:size] = -1
        self._update_tables([sequence.block_ids for sequence, _ in places])
        return size

    def tensors(self, size: int, shared: SharedParts | None = None) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Token ids, positions, slots and attention metadata of the first `size` rows."""
        token_ids, positions, slots, context_lens = self._rows[:, :size]
        metadata = AttentionMetadata(
            query_start=self._query_start[: size + 1],
            context_lens=context_lens.to(torch.int32),
            block_tables=self._tables[:size],
            max_query_len=1,
            max_context_len=self._max_model_len,
            shared=shared,
        )
        return token_ids, positions, slots, metadata

    def adapter_slots(self, size: int) -> Tensor:
        """The adapter slots of the first `size` rows, [size] int32."""
        return self._adapter_slots[:size]

    def _take_over(self, unseen: UnseenTokens, sources: Sequence[int | None]) -> None:
        """sources: for each row, its token's row in `unseen`, or None if the host knows the token."""
        # Usually, sequences and their order are the same as in the previous step.
        if sources == list(range(len(unseen.token_ids))):
            torch.clamp(unseen.token_ids, min=PLACEHOLDER, out=self._rows[0, : len(sources)])
        elif pairs := [(row, source) for row, source in enumerate(sources) if source is not None]:
            rows, places = upload(np.array(pairs).T, torch.int64, self._rows.device)
            self._rows[0].index_copy_(0, rows, unseen.token_ids[places].clamp_(min=PLACEHOLDER))

    def _update_tables(self, rows_tables: "Sequence[array[int]]") -> None:
        changed = [row for row, table in enumerate(rows_tables) if table != self._known_tables[row]]
        if not changed:
            return
        width = self._tables.shape[1]
        tables = [rows_tables[row][:width] for row in changed]
        entries = np.zeros((len(changed), max(map(len, tables))), dtype=np.int32)
        for place, table in enumerate(tables):
            entries[place, : len(table)] = table
        device = self._tables.device
        rows = upload(changed, torch.int64, device)
        self._tables[:, : entries.shape[1]].index_copy_(0, rows, upload(entries, torch.int32, device))
        for row in changed:  # stored last, because earlier calls can fail
            self._known_tables[row] = array(TOKENS, rows_tables[row])
