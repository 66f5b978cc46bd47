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


UNCUT: Mapping[str, Cut] = {}
"""The cuts of tensors that are all held whole."""
