"""Rules for the order of tokens in a transcript, which a speech model writes.

A speech model (Whisper; Radford et al., 2023) marks times with timestamp tokens, 20 ms apart. A timestamp comes before
each part of the text, and another timestamp comes after it. Which token may come next depends on the tokens before it,
so workers apply the rules of a transcript when they choose a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptParams:
    """Tokens of `suppressed` are never chosen. Tokens of `begin_suppressed` are not chosen as the first token.

    `first_timestamp` is the id of the token that marks 0 s; higher ids mark later times. A transcript with
    `first_timestamp` 0 has no timestamps. A transcript with timestamps begins with a timestamp, whose id is at most
    `first_timestamp` + `max_initial`. The first `num_text_tokens` tokens of the vocabulary are text.
    """

    first_timestamp: int = 0
    max_initial: int = 0
    num_text_tokens: int = 0
    suppressed: Sequence[int] = ()
    begin_suppressed: Sequence[int] = ()
