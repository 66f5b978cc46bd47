"""The progress of an output in its form (grammar): the tokens read, and the CPU time that the form may still use."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

MAX_LEFT = 3.0
"""Seconds of CPU that an output's form may use before its first token. Each token adds `TOKEN_SECONDS`."""
TOKEN_SECONDS = 0.01
"""Seconds of CPU that each token adds to the limit. The value is three times the slowest of 420 forms, see
`MAX_SECONDS`."""


@dataclass(slots=True, eq=False)
class Progress:
    """A process's progress in reading an output. After this object is freed, the process forgets the output."""

    key: int
    gone: deque[int]
    reader: Connection | None = None
    num_tokens: int = 0
    """Number of tokens that were sent to the process."""
    num_masks: int = 0
    """Number of masks that the process's matcher has computed."""
    left: float = field(default_factory=lambda: MAX_LEFT)
    """Seconds of CPU that the form may still use."""
    taken: float = 0.0
    """Seconds spent waiting for the output's answers, over all processes."""
    memory: int = 0
    """Bytes by which the process's memory has grown for the output."""
    is_over: bool = False
    """Whether the output has ended because of its form."""
    is_alone: bool = False
    """Whether the output has a separately compiled form and no drafts.

    Set after the output's matcher has failed or its process has died. The cause may be the library's limits, which the
    outputs of a form and their drafts share by default.
    """

    @property
    def is_fresh(self) -> bool:
        """Whether the matcher's answer depends only on the output's tokens. The matcher must be separate, and must not
        have computed a mask.
        """
        return self.is_alone and not self.num_masks

    def begin(self, reader: Connection) -> None:
        """Restart the record for a new process, whose matcher has read no token of the output."""
        self.reader, self.num_tokens, self.num_masks, self.left, self.memory = reader, 0, 0, MAX_LEFT, 0

    def charge(self, seconds: float, num_tokens: int) -> None:
        """Subtract the CPU seconds that were used, and add `TOKEN_SECONDS` for each token."""
        cost = seconds if self.num_masks else seconds / 2
        self.left = min(self.left - cost + num_tokens * TOKEN_SECONDS, MAX_LEFT)

    def __del__(self) -> None:
        self.gone.append(self.key)


class FormedOutput(NamedTuple):
    """A step's sequence with a form, as input of the thread that requests masks."""

    sequence_id: int
    form: str
    owner: bytes
    progress: Progress
    token_ids: "array[int]"  # all tokens of the output
    samples: bool
    drafts: "array[int]"

    @property
    def num_masks(self) -> int:
        """Number of masks that the output needs: one after its last token, and one after each draft."""
        return 1 + len(self.drafts) if self.samples else 0
