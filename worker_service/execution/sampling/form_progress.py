"""How much of an output its form has read, and how much time the form may still take."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

MAX_LEFT = 3.0
"""Seconds of CPU that an output's form may take in advance; each token adds to them."""
TOKEN_SECONDS = 0.01
"""Seconds of CPU that each token adds. Three times the slowest of 420 forms: see `MAX_SECONDS`."""


@dataclass(slots=True, eq=False)
class Progress:
    """How far a process has read an output. When this object is freed, its key joins the keys to forget."""

    key: int
    gone: deque[int]
    reader: Connection | None = None
    num_tokens: int = 0
    """Tokens that the process was sent."""
    num_masks: int = 0
    """Masks that the process's matcher has computed."""
    left: float = field(default_factory=lambda: MAX_LEFT)
    """Seconds of CPU that the form may still take."""
    taken: float = 0.0
    """Seconds spent waiting for its answers, over all processes."""
    memory: int = 0
    """Bytes of memory that the process has grown by for it."""
    is_over: bool = False
    """Whether its form took too long."""
    is_alone: bool = False
    """Whether its form is compiled separately and has no drafts. Outputs of one form, and drafts, share limits of the
    library, which have stopped some matchers."""

    @property
    def is_fresh(self) -> bool:
        """Whether the matcher's answer depends on the output's tokens alone: it is separate and has computed no
        mask."""
        return self.is_alone and not self.num_masks

    def begin(self, reader: Connection) -> None:
        """Have a new matcher of this process read the output from the start."""
        self.reader, self.num_tokens, self.num_masks, self.left, self.memory = reader, 0, 0, MAX_LEFT, 0

    def charge(self, seconds: float, num_tokens: int) -> None:
        """Charge these seconds, and credit these tokens."""
        cost = seconds if self.num_masks else seconds / 2
        self.left = min(self.left - cost + num_tokens * TOKEN_SECONDS, MAX_LEFT)

    def __del__(self) -> None:
        self.gone.append(self.key)


class FormedOutput(NamedTuple):
    """A sequence of the step with a form, as the thread that speaks with the process needs it."""

    sequence_id: int
    form: str
    owner: bytes
    progress: Progress
    token_ids: "array[int]"  # all tokens of the output
    samples: bool
    drafts: "array[int]"

    @property
    def num_masks(self) -> int:
        """Masks that it needs: one after its last token, and one after each draft."""
        return 1 + len(self.drafts) if self.samples else 0
