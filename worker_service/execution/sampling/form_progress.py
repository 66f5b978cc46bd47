"""The progress of an output in its form (grammar): the tokens that a matcher has read, and the CPU time left for the
output.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

MAX_LEFT = 3.0
"""CPU time in seconds that a form may use before the output's first token. Each token adds `TOKEN_SECONDS`."""
TOKEN_SECONDS = 0.01
"""CPU time in seconds that each token adds to the time left for an output. The value is three times the time for each
token of the slowest of 420 forms, see `pagewire_common.forms.MAX_SECONDS`."""


@dataclass(slots=True, eq=False)
class Progress:
    """The progress of the process that reads an output. When this object is freed, the process frees the output's
    matcher.
    """

    key: int
    gone: deque[int]
    reader: Connection | None = None
    num_tokens: int = 0
    """Number of the output's tokens that the worker has sent to the process."""
    num_masks: int = 0
    """Number of steps in which the output's matcher has computed a mask for sampling."""
    left: float = field(default_factory=lambda: MAX_LEFT)
    """CPU time in seconds that the output's form may still use."""
    taken: float = 0.0
    """Seconds that the worker has waited for answers for this output, summed over all processes that have read the
    output.
    """
    memory: int = 0
    """Bytes by which the process's memory has grown while it computed answers for this output."""
    is_over: bool = False
    """Whether the worker has ended the output, because computing its masks takes too much time or memory."""
    is_alone: bool = False
    """Whether the output's form is compiled separately for this output, and the output has no drafts.

    This field is set after the output's matcher has failed or its process has died. The cause may be llguidance's
    limits, which all outputs of a form and their drafts otherwise share.
    """

    @property
    def is_fresh(self) -> bool:
        """Whether the matcher's next answer depends only on the output's tokens. Such a matcher is compiled separately
        for the output, and has computed no mask yet.
        """
        return self.is_alone and not self.num_masks

    def begin(self, reader: Connection) -> None:
        """Start again with a new process, which has read no token of the output."""
        self.reader, self.num_tokens, self.num_masks, self.left, self.memory = reader, 0, 0, MAX_LEFT, 0

    def charge(self, seconds: float, num_tokens: int) -> None:
        """Charge CPU time to the output: subtract `seconds` from the time left, and add `TOKEN_SECONDS` for each token
        that was read.
        """
        cost = seconds if self.num_masks else seconds / 2
        self.left = min(self.left - cost + num_tokens * TOKEN_SECONDS, MAX_LEFT)

    def __del__(self) -> None:
        self.gone.append(self.key)


class FormedOutput(NamedTuple):
    """A sequence of the current step that has an output form, as input of the thread that requests masks."""

    sequence_id: int
    form: str
    owner: bytes
    progress: Progress
    token_ids: "array[int]"  # all tokens of the output so far
    samples: bool
    drafts: "array[int]"

    @property
    def num_masks(self) -> int:
        """Number of masks that the output needs in this step: one after its last token and one after each draft, or
        none.
        """
        return 1 + len(self.drafts) if self.samples else 0
