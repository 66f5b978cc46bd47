"""How tokens of a transcript follow each other, of a model that writes down what is said.

Such a model (Whisper; Radford et al., 2023) marks when something is said with tokens for times, 20 ms apart: one before
each part of the text, and one behind it. Which token may come next depends on those before it, so that workers apply
these rules, where tokens are chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptParams:
    """No token of `suppressed` is ever chosen, and none of `begin_suppressed` as the first.

    `first_timestamp` is the token of 0 s, and those behind it are of later times; with 0 no times are marked. Where
    they are, the first token is that of a time, at most the `max_initial`-th behind that of 0 s; and the first
    `num_text_tokens` of the vocabulary are text.
    """

    first_timestamp: int = 0
    max_initial: int = 0
    num_text_tokens: int = 0
    suppressed: Sequence[int] = ()
    begin_suppressed: Sequence[int] = ()
