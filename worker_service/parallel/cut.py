"""Describes the part of a checkpoint's tensor that one rank stores. The other ranks store the other parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A part of a matrix or vector: some of its rows, and some columns of these rows."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    rows: Sequence[range]
    """Ranges of rows (first dimension). The part is the concatenation of these rows."""
    columns: range
    """The range of columns (second dimension), or range(1) for a vector."""

    def of(self, whole: Tensor) -> Tensor:
        """Cut the part out of a whole tensor that is in memory."""
        rows = torch.cat([whole[stretch.start : stretch.stop] for stretch in self.rows])
        return rows if rows.dim() == 1 else rows[:, self.columns.start : self.columns.stop]

    def of_halves(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Cut the part out of a matrix that is stored as the product `b @ a`. Returns the factors of the part, as
        copies.

        a: shape [inner units, columns]. b: shape [rows, inner units].
        """
        own_b = torch.cat([b[stretch.start : stretch.stop] for stretch in self.rows])
        return a[:, self.columns.start : self.columns.stop].clone(), own_b


UNCUT: Mapping[str, Cut] = {}
"""The cuts of a worker with a single rank, which stores every tensor as a whole."""
