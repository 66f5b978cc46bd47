"""Parameters of a pooled request, which asks for vectors or scores from the hidden states of its prompt.

A pooled request has one output of one token, which is never sampled, so that planning needs no special case.
"""

import enum
from dataclasses import dataclass


class PoolingType(enum.Enum):
    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """Score of a text, from the network's classifier layer."""
    ALIGNMENT = enum.auto()
    """Time of each of a transcript's last `dimensions` tokens, from the decoder's attention to the audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """`dimensions`: leading numbers of each vector to keep. `normalize`: scale vectors to length 1.

    `half`: 16-bit numbers, not 32-bit. `num_first_tokens`: tokens of the first text of a pair, or 0.
    `num_sound_tokens`: tokens of the encoder's input that belong to the audio.
    """

    type: PoolingType
    dimensions: int
    normalize: bool = False
    half: bool = False
    num_first_tokens: int = 0
    num_sound_tokens: int = 0

    @property
    def vector_bytes(self) -> int:
        return self.dimensions * (2 if self.half else 4)

    @property
    def needs_all_states(self) -> bool:
        """Whether the hidden states of all tokens are required; the cache contains none."""
        return self.type is not PoolingType.LAST

    def num_vectors(self, num_tokens: int, *, is_last: bool) -> int:
        """Vectors from `num_tokens` computed tokens. `is_last`: whether the prompt's last token is among them."""
        if self.type is PoolingType.ALL:
            return num_tokens
        return int(is_last)
