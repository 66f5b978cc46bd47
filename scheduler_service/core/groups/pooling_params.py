"""Parameters of a request for its prompt's states instead of tokens.

A request that is pooled is one of a single output of a single token, which is never sampled: when its prompt is
computed, it has ended. So chunks, budgets, queues, preemption and lost workers are those of any other request.
"""

import enum
from dataclasses import dataclass


class PoolingType(enum.Enum):
    """How states become one vector, or one for each token."""

    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """The score that the network's classifier gives the text."""
    ALIGNMENT = enum.auto()
    """When each of the last tokens of a transcript is said, by what the decoder attends to in the sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The first `dimensions` numbers of each vector, which are then made 1 long if it is to `normalize`.

    Numbers have 16 bits if they are to be `half`, else 32. Of a pair of texts the first has `num_first_tokens`, 0 where
    there is no pair. An alignment has one vector, with a number for each of the last `dimensions` tokens of the prompt;
    `num_sound_tokens` of what the encoder reads belong to the sound.
    """

    type: PoolingType
    dimensions: int
    normalize: bool = False
    half: bool = False
    num_first_tokens: int = 0
    num_sound_tokens: int = 0

    @property
    def vector_bytes(self) -> int:
        """The bytes of one vector."""
        return self.dimensions * (2 if self.half else 4)

    @property
    def needs_all_states(self) -> bool:
        """Whether states of tokens other than the last count, which are not those that the cache keeps."""
        return self.type is not PoolingType.LAST

    def num_vectors(self, num_tokens: int, *, is_last: bool) -> int:
        """How many vectors so many computed tokens give, the prompt's last one among them or not."""
        if self.type is PoolingType.ALL:
            return num_tokens
        return int(is_last)
