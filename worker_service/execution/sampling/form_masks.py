"""The tokens that forms allow next, as the device thread waits for them where it samples."""

from collections.abc import Sequence, Set
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.session.session import SequenceState


class FoundMasks(NamedTuple):
    masks: npt.NDArray[np.uint8]
    """[rows, bytes]"""
    late: Set[int]
    """Ids of sequences."""


class FormMasks:
    """The tokens that may come next in a step, of the sequences that have a form and sample, and after drafts."""

    def __init__(self, rows: dict[tuple[int, int], int], found: "Future[FoundMasks]") -> None:
        self._rows = rows  # by sequence id and number of tokens
        self._found = found

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.uint8]:
        """[sequences, bytes], a bit a token, the lowest of a byte first, once they are known.

        A sequence whose form cannot go on has none, nor has one that is late.
        """
        return self._found.result().masks[[self._rows[one.sequence_id, len(one.token_ids)] for one in sequences]]

    def late(self) -> Set[int]:
        """Ids of the sequences that sample later: what they have written before is still being read."""
        return self._found.result().late if self._rows else frozenset()
