"""Describes the part of a checkpoint's tensor that one rank stores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Some rows of a matrix or vector, and some columns of these rows."""

    shape: tuple[int, ...]
    """The whole tensor's shape."""
    rows: Sequence[range]
    """Ranges of rows, which are concatenated."""
    columns: range
    """The range of columns, or range(1) for a vector."""

    def of(self, whole: Tensor) -> Tensor:
        """Cut the part out of a whole tensor in memory."""
        rows = torch.cat([whole[stretch.start : stretch.stop] for stretch in self.rows])
        return rows if rows.dim() == 1 else rows[:, self.columns.start : self.columns.stop]

    def of_halves(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Cut the part out of the matrix `b @ a`. Returns the factors of the part, as copies.

        a: [inner units, columns]. b: [rows, inner units]."""
        own_b = torch.cat([b[stretch.start : stretch.stop] for stretch in self.rows])
        return a[:, self.columns.start : self.columns.stop].clone(), own_b


UNCUT: Mapping[str, Cut] = {}
"""The cuts of a worker with a single rank."""
