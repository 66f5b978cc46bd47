"""Parameters of a request for vectors or scores from its prompt's states, instead of tokens.

A pooled request has one output of one token, which is never sampled. The request ends when its prompt is computed. So
chunks, budgets, queues, preemption and lost workers need no special case for pooled requests.
"""

import enum
from dataclasses import dataclass


class PoolingType(enum.Enum):
    """How states become one vector, or one vector for each token."""

    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """The score that the network's classifier gives the text."""
    ALIGNMENT = enum.auto()
    """The time of each of the last tokens of a transcript, from the decoder's attention to the audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """`dimensions`: leading numbers of each vector to keep. `normalize`: scale the result to length 1.

    `half`: numbers have 16 bits, not 32. `num_first_tokens`: number of tokens of the first text of a pair; 0 for a
    single text. An alignment has one vector, with a number for each of the last `dimensions` tokens of the prompt.
    `num_sound_tokens`: number of tokens of the encoder's input that belong to the audio.
    """

    type: PoolingType
    dimensions: int
    normalize: bool = False
    half: bool = False
    num_first_tokens: int = 0
    num_sound_tokens: int = 0

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector."""
        return self.dimensions * (2 if self.half else 4)

    @property
    def needs_all_states(self) -> bool:
        """Whether the states of all tokens are required. Cached tokens have no states, so no token is taken from the
        cache."""
        return self.type is not PoolingType.LAST

    def num_vectors(self, num_tokens: int, *, is_last: bool) -> int:
        """Number of vectors from `num_tokens` computed tokens. `is_last`: the prompt's last token is one of them."""
        if self.type is PoolingType.ALL:
            return num_tokens
        return int(is_last)
