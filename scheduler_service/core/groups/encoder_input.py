"""The input of an encoder-decoder model's encoder, as a sequence of a request's group.

The encoder's tokens are computed in one step, before any output attends to them. The blocks of an encoder's input store
keys and values, which each decoder layer computes once from the encoder's hidden states. The block table of an
encoder's input is the cross-attention table of all outputs in the group. The table of an encoder's input never grows,
and its blocks are written once. Each token of the input depends on all other tokens, so the prefix cache finds all
blocks of an encoder's input, or none.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """Token ids, or audio features that the encoder turns into `num_tokens` tokens.

    Equal inputs have equal digests. `features` are 32-bit floats in little-endian order, as the worker's network reads
    them. A request that is replayed from a recording has no features; `num_feature_bytes` stores the size of the
    original features.
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
