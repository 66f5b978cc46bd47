"""Masks of the tokens that output forms (grammars) allow next."""

from collections.abc import Sequence, Set
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.session.sequence_state import SequenceState


class FoundMasks(NamedTuple):
    masks: npt.NDArray[np.uint8]
    """[rows, bytes]: a bit for each token of the vocabulary."""
    late: Set[int]
    """Ids of sequences whose masks are late."""


class FormMasks:
    """The masks of a step, which another process computes: after the last token and after each draft of a sequence that
    samples."""

    def __init__(self, rows: dict[tuple[int, int], int], found: "Future[FoundMasks]") -> None:
        self._rows = rows  # key: sequence id and number of tokens
        self._found = found

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.uint8]:
        """Wait for the step's masks. Returns [sequences, bytes], a bit for each token, the lowest bit of a byte first.

        No bit is set if the form allows no token, or if the mask is late."""
        return self._found.result().masks[[self._rows[one.sequence_id, len(one.token_ids)] for one in sequences]]

    def late(self) -> Set[int]:
        """Ids of sequences that sample no token in this step, because the process has not read all their tokens."""
        return self._found.result().late if self._rows else frozenset()
