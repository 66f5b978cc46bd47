"""Finds rows of a decode step whose contexts begin with the same blocks, so that attention reads shared blocks once.

A row is one query token. A shared prefix is split into parts of `PART_KEYS` keys. An item is one part and a group of
rows: an attention kernel reads the part once for the whole group.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.inputs import PART_KEYS, SharedParts, upload

_ITEMS_A_ROW = 2
"""Items to allocate per row of a step. With 2, 256 rows in items of 16 rows and 512 tokens can share 16,384 tokens."""


class SharedRows(NamedTuple):
    """The fields of the kernels' `SharedParts` as lists in host memory."""

    items: list[tuple[int, int, int]]
    rows: list[int]
    num_parts: list[int]
    num_saved: int
    """Key reads that sharing saves."""


def find_shared(
    tables: "Sequence[array[int]]",
    contexts: Sequence[int],
    block_size: int,
    *,
    most_rows: int,
    most_items: int,
    most_parts: int,
) -> SharedRows:
    """Find the parts of prefixes that several rows of a step share.

    tables: each row's block table. contexts: tokens to which each row attends. most_rows: maximum rows of an item."""
    items: list[tuple[int, int, int]] = []
    rows: list[int] = []
    num_parts = [0] * len(tables)
    num_saved = 0
    # A row's context needs at least one key after the shared parts.
    groups = _sharing_rows(tables, (row for row, context in enumerate(contexts) if context > PART_KEYS), 0, 1)
    for part in range(most_parts):
        first, last = part * PART_KEYS // block_size, ((part + 1) * PART_KEYS - 1) // block_size + 1
        longer = []
        for group in groups:
            longer_rows = (row for row in group if contexts[row] > (part + 1) * PART_KEYS)
            for found in _sharing_rows(tables, longer_rows, first, last):
                cuts = [found[start : start + most_rows] for start in range(0, len(found), most_rows)]
                if len(items) + len(cuts) > most_items:
                    continue
                for cut in cuts:
                    items.append((part, len(rows), len(cut)))
                    rows += cut
                for row in found:
                    num_parts[row] = part + 1
                num_saved += (len(found) - len(cuts)) * PART_KEYS
                longer.append(found)
        groups = longer
        if not groups:
            break
    return SharedRows(items, rows, num_parts, num_saved)


def _sharing_rows(tables: "Sequence[array[int]]", rows: Iterable[int], first: int, last: int) -> list[list[int]]:
    """Groups of two or more rows whose block tables are equal in [first, last)."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for row in rows:
        groups[tables[row][first:last].tobytes()].append(row)
    return [group for group in groups.values() if len(group) > 1]


class SharedInputs:
    """Device buffers for a step's shared parts, at fixed addresses for the replay of CUDA graphs."""

    def __init__(
        self,
        max_num_rows: int,
        most_rows: int,
        most_parts: int,
        room: int,
        least_saved: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """most_rows: maximum rows of an item. most_parts: maximum parts of a row. room: maximum parts over all rows of
        a step. least_saved: minimum key reads that sharing must save."""
        self._most_rows, self._longest, self._room, self._least_saved = most_rows, most_parts, room, least_saved
        self._block_size = block_size
        most_items = _ITEMS_A_ROW * max_num_rows
        self._items = torch.zeros((most_items, 3), dtype=torch.int32, device=device)
        self._rows = torch.zeros(most_items * most_rows, dtype=torch.int32, device=device)
        self._num_parts = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self._known: tuple[SharedRows, int] | None = None

    def find(self, tables: "Sequence[array[int]]", contexts: Sequence[int], size: int) -> SharedRows | None:
        """The shared parts of a step that is padded to `size` rows, or None if sharing saves too few key reads."""
        found = find_shared(
            tables,
            contexts,
            self._block_size,
            most_rows=self._most_rows,
            most_items=_ITEMS_A_ROW * size,
            most_parts=self.most_parts(size),
        )
        return found if found.items and found.num_saved >= self._least_saved else None

    def fill(self, tables: "Sequence[array[int]]", contexts: Sequence[int], size: int) -> bool:
        """Store the shared parts of a step that is padded to `size` rows. Returns False if sharing saves too few key
        reads."""
        found = self.find(tables, contexts, size)
        if found is None:
            return False
        if (found, size) != self._known:  # most steps share the last step's parts
            items = np.zeros((_ITEMS_A_ROW * size, 3), dtype=np.int32)
            items[: len(found.items)] = found.items
            num_parts = np.zeros(size, dtype=np.int32)
            num_parts[: len(tables)] = found.num_parts
            device = self._items.device
            self._items[: len(items)] = upload(items, torch.int32, device)
            self._rows[: len(found.rows)] = upload(found.rows, torch.int32, device)
            self._num_parts[:size] = upload(num_parts, torch.int32, device)
            self._known = found, size
        return True

    def tensors(self, size: int) -> SharedParts:
        """The stored shared parts. size: rows of the step, padding included."""
        items: Tensor = self._items[: _ITEMS_A_ROW * size]
        return SharedParts(items, self._rows, self._num_parts[:size], self.most_parts(size))

    def most_parts(self, size: int) -> int:
        """Maximum parts of one row in a step of `size` rows, limited by the number of items, too."""
        return min(self._longest, self._room // size, _ITEMS_A_ROW * self._most_rows)
