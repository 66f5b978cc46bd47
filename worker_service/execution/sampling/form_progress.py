"""The progress of an output in its form (grammar): the tokens read, and the CPU time left."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

MAX_LEFT = 3.0
"""CPU seconds that a form may use before the output's first token."""
TOKEN_SECONDS = 0.01
"""CPU seconds that each token adds: three times the slowest of 420 forms, see `pagewire_common.forms.MAX_SECONDS`."""


@dataclass(slots=True, eq=False)
class Progress:
    """An output's progress in the process that computes masks. Freeing this object frees the matcher."""

    key: int
    gone: deque[int]
    reader: Connection | None = None
    num_tokens: int = 0
    """Tokens that the worker has sent to the process."""
    num_masks: int = 0
    """Steps in which the matcher has computed a mask for sampling."""
    left: float = field(default_factory=lambda: MAX_LEFT)
    """CPU seconds that the form may still use."""
    taken: float = 0.0
    """Seconds that the worker has waited for the output's answers, over all processes."""
    memory: int = 0
    """Bytes by which the process has grown while computing the output's answers."""
    is_over: bool = False
    """Whether the worker has ended the output, because its masks take too much time or memory."""
    is_alone: bool = False
    """Whether the form is compiled for this output only, and the output has no drafts. Set after the matcher has failed
    or its process has died, perhaps because of llguidance's limits, which all outputs of a form share."""

    @property
    def is_fresh(self) -> bool:
        """Whether the next answer depends only on the output's tokens: a separately compiled matcher without a mask
        yet."""
        return self.is_alone and not self.num_masks

    def begin(self, reader: Connection) -> None:
        """Start again with a process that has read no token."""
        self.reader, self.num_tokens, self.num_masks, self.left, self.memory = reader, 0, 0, MAX_LEFT, 0

    def charge(self, seconds: float, num_tokens: int) -> None:
        """Charge `seconds` of CPU time, and add `TOKEN_SECONDS` for each token read. Reading again costs half."""
        cost = seconds if self.num_masks else seconds / 2
        self.left = min(self.left - cost + num_tokens * TOKEN_SECONDS, MAX_LEFT)

    def __del__(self) -> None:
        self.gone.append(self.key)


class FormedOutput(NamedTuple):
    """A sequence with an output form in the current step, as input of the thread that requests masks."""

    sequence_id: int
    form: str
    owner: bytes
    progress: Progress
    token_ids: "array[int]"  # all tokens of the output so far
    samples: bool
    drafts: "array[int]"

    @property
    def num_masks(self) -> int:
        """Masks needed in this step: after the last token and after each draft, or none."""
        return 1 + len(self.drafts) if self.samples else 0
