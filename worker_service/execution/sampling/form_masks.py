"""Masks of the tokens that output forms (grammars) allow next. The device thread waits for a step's masks before it
samples.
"""

from collections.abc import Sequence, Set
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.session.session import SequenceState


class FoundMasks(NamedTuple):
    masks: npt.NDArray[np.uint8]
    """Shape [rows, bytes]: for each row of logits, a bit for each token of the vocabulary that is allowed next."""
    late: Set[int]
    """Ids of sequences without a mask in this step, because their masks are late."""


class FormMasks:
    """The masks that a step needs, and that another process computes. A sequence with an output form that samples has
    one mask after its last token, and one after each draft.
    """

    def __init__(self, rows: dict[tuple[int, int], int], found: "Future[FoundMasks]") -> None:
        self._rows = rows  # key: sequence id and number of tokens
        self._found = found

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.uint8]:
        """Wait for the step's masks. Returns shape [sequences, bytes] with a bit for each token, the lowest bit of a
        byte first.

        A mask has no set bit if the sequence's output form allows no further token, or if the mask is late.
        """
        return self._found.result().masks[[self._rows[one.sequence_id, len(one.token_ids)] for one in sequences]]

    def late(self) -> Set[int]:
        """Ids of late sequences. A late sequence samples no token in this step, because the process that computes masks
        has not read all tokens of the sequence.
        """
        return self._found.result().late if self._rows else frozenset()
