"""Masks of the tokens that forms (grammars) allow next. The device thread waits for the masks before sampling."""

from collections.abc import Sequence, Set
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.session.session import SequenceState


class FoundMasks(NamedTuple):
    masks: npt.NDArray[np.uint8]
    """[rows, bytes]: a bit for each token that is allowed next."""
    late: Set[int]
    """Ids of sequences whose masks are late."""


class FormMasks:
    """The masks of a step. Each sampling sequence with a form has a mask after its last token and after each draft."""

    def __init__(self, rows: dict[tuple[int, int], int], found: "Future[FoundMasks]") -> None:
        self._rows = rows  # by sequence id and number of tokens
        self._found = found

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.uint8]:
        """Wait for the masks. Returns [sequences, bytes], a bit for each token, the lowest bit of a byte first.

        The mask is empty if the sequence's form cannot continue or the sequence is late.
        """
        return self._found.result().masks[[self._rows[one.sequence_id, len(one.token_ids)] for one in sequences]]

    def late(self) -> Set[int]:
        """Ids of late sequences. A late sequence does not sample in this step, because the form's process has not read
        all its tokens.
        """
        return self._found.result().late if self._rows else frozenset()
