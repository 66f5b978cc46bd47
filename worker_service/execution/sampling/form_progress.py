"""An output that has a form: how far it has been read, and what its form may still cost."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

MOST_LEFT = 3.0
"""Seconds of a processor that an output's form may take before its tokens have paid for more."""
TOKEN_SECONDS = 0.01
"""Three times what any of 420 forms took for a token: see `MOST_SECONDS`."""


@dataclass(slots=True, eq=False)
class Progress:
    """How far a process has read an output. When it goes, its key is among those to forget."""

    key: int
    gone: deque[int]
    reader: Connection | None = None
    num_tokens: int = 0
    """That the process was sent."""
    num_masks: int = 0
    """That its matcher has found."""
    left: float = field(default_factory=lambda: MOST_LEFT)
    """Seconds of a processor that its form may still take."""
    taken: float = 0.0
    """Seconds that its answers were waited for, in all processes."""
    memory: int = 0
    """Bytes that the process has grown by for it."""
    is_over: bool = False
    """Whether its form took too long."""
    is_alone: bool = False
    """Whether its form is compiled for it, and nothing drafted: outputs of one form, and drafts, share limits of the
    library, and some have ended a reading of it."""

    @property
    def is_fresh(self) -> bool:
        """Whether what its matcher says follows from its tokens alone: it was made for it, and has found no mask."""
        return self.is_alone and not self.num_masks

    def begin(self, reader: Connection) -> None:
        """Read it anew, by a new matcher."""
        self.reader, self.num_tokens, self.num_masks, self.left, self.memory = reader, 0, 0, MOST_LEFT, 0

    def charge(self, seconds: float, num_tokens: int) -> None:
        """So many tokens took so long."""
        cost = seconds if self.num_masks else seconds / 2
        self.left = min(self.left - cost + num_tokens * TOKEN_SECONDS, MOST_LEFT)

    def __del__(self) -> None:
        self.gone.append(self.key)


class FormedOutput(NamedTuple):
    """A sequence of the step that has a form, as the thread that speaks with the process needs it."""

    sequence_id: int
    form: str
    owner: bytes
    progress: Progress
    token_ids: "array[int]"  # all of the output
    samples: bool
    drafts: "array[int]"

    @property
    def num_masks(self) -> int:
        """Masks that it needs: what may follow it, and what may follow each draft token."""
        return 1 + len(self.drafts) if self.samples else 0
