"""Masks of the tokens that forms allow next; the device thread waits for them when it samples. 16 Ids of sequences
whose mask is late."""

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
    """Masks of a step's sequences that have a form and sample: one after the last token, one after each draft."""

    def __init__(self, rows: dict[tuple[int, int], int], found: "Future[FoundMasks]") -> None:
        self._rows = rows  # by sequence id and number of tokens
        self._found = found

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.uint8]:
        """Waits for the masks: [sequences, bytes], a bit for each token, the lowest bit of a byte first.

        The mask is empty for a sequence whose form cannot continue, and for a late sequence.
        """
        return self._found.result().masks[[self._rows[one.sequence_id, len(one.token_ids)] for one in sequences]]

    def late(self) -> Set[int]:
        """Ids of the sequences that do not sample in this step, because earlier tokens are still being read."""
        return self._found.result().late if self._rows else frozenset()
