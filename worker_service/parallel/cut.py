"""The part of a checkpoint's tensor that is held here, where another process holds the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Some rows of a matrix or vector, and some columns of these rows."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    rows: Sequence[range]
    """Stretches of the first dimension; the part has them one behind the other."""
    columns: range
    """A stretch of the second dimension; of a vector range(1)."""

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor that is in memory."""
        rows = torch.cat([whole[stretch.start : stretch.stop] for stretch in self.rows])
        return rows if rows.dim() == 1 else rows[:, self.columns.start : self.columns.stop]

    def of_halves(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The halves of this part of a whole tensor `b @ a`, in memory of their own.

        a: [inner units, columns]; b: [rows, inner units].
        """
        own_b = torch.cat([b[stretch.start : stretch.stop] for stretch in self.rows])
        return a[:, self.columns.start : self.columns.stop].clone(), own_b


UNCUT: Mapping[str, Cut] = {}
"""The cuts of tensors that are all held whole."""
