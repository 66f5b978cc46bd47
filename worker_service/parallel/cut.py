"""The part of a checkpoint's tensor that this rank stores. Other ranks store the other parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A part of a matrix or vector: some rows, and some columns of these rows."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    rows: Sequence[range]
    """Ranges of the first dimension, which are concatenated."""
    columns: range
    """A range of the second dimension, or range(1) for a vector."""

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor in memory."""
        rows = torch.cat([whole[stretch.start : stretch.stop] for stretch in self.rows])
        return rows if rows.dim() == 1 else rows[:, self.columns.start : self.columns.stop]

    def of_halves(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of this part of a whole tensor `b @ a`, as copies.

        a: shape [inner units, columns]. b: shape [rows, inner units].
        """
        own_b = torch.cat([b[stretch.start : stretch.stop] for stretch in self.rows])
        return a[:, self.columns.start : self.columns.stop].clone(), own_b


UNCUT: Mapping[str, Cut] = {}
"""The cuts of a worker with one rank: every tensor is whole."""
