"""The input of an encoder-decoder model's encoder.

The tokens are computed in one step, before any output attends to them. Their blocks store the keys and values that each
decoder layer computes from the encoder's hidden states; the block table is the cross-attention table of all outputs.
Each token depends on all others, so the prefix cache finds all blocks of an input, or none.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """Token ids, or audio features that the encoder turns into `num_tokens` tokens. Equal inputs have equal digests.

    `features` are 32-bit little-endian floats. A replayed request has no features, only `num_feature_bytes`.
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
