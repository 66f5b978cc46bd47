"""The input of an encoder-decoder model's encoder, as a sequence of a request's group.

The encoder's tokens are computed whole, in one step, before any output reads them. What is kept of them is not states
but keys and values: each of the decoder's layers makes its own of them, once, and they lie in blocks like those of any
tokens. So the block table of this sequence is the table of cross attention for all outputs of the group, which share
it by sharing the group. It never grows, is never written again, and is found in the prefix cache all or not at all,
because each of its tokens has seen all others.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """Token ids, or the features of a sound that its encoder makes `num_tokens` of.

    Equal inputs have equal digests. `features` are numbers of 32 bits, little-endian, as the worker's network reads
    them; where a request is only replayed there are none, and `num_feature_bytes` says how many there were.
    """

    num_tokens: int
    token_ids: Sequence[int] = ()
    features: bytes = b""
    num_feature_bytes: int = 0
    digest: bytes = b""

    def __post_init__(self) -> None:
        token_ids = array("I", self.token_ids)
        object.__setattr__(self, "token_ids", token_ids)
        if self.features:
            object.__setattr__(self, "num_feature_bytes", len(self.features))
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(self.features or token_ids.tobytes()).digest())
