"""Parameters of a pooled request, which asks for vectors or scores from the hidden states of its prompt, instead of
tokens.

A pooled request has one output of one token, which is never sampled. A pooled request ends when its prompt is computed.
Because a pooled request has an output, it needs no special case in chunks, budgets, queues, preemption and lost
workers.
"""

import enum
from dataclasses import dataclass


class PoolingType(enum.Enum):
    """How the hidden states of a prompt become one vector, or one vector for each token."""

    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """The score of a text, from the classifier layer of the network."""
    ALIGNMENT = enum.auto()
    """The time of each of the last tokens of a transcript, from the decoder's attention to the audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """`dimensions`: how many leading numbers of each vector are kept. `normalize`: whether vectors are scaled to length
    1.

    `half`: whether the numbers of a vector have 16 bits, not 32. `num_first_tokens`: number of tokens of the first text
    of a pair; 0 for a single text. The result of ALIGNMENT is one vector, with a number for each of the last
    `dimensions` tokens of the prompt. `num_sound_tokens`: number of tokens of the encoder's input that belong to the
    audio.
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
        """Whether the hidden states of all tokens are required. The cache contains no hidden states, so no token of
        such a prompt is taken from the cache."""
        return self.type is not PoolingType.LAST

    def num_vectors(self, num_tokens: int, *, is_last: bool) -> int:
        """Number of vectors from `num_tokens` computed tokens. `is_last`: whether the prompt's last token is one of
        these tokens."""
        if self.type is PoolingType.ALL:
            return num_tokens
        return int(is_last)
