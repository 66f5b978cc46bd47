"""The words of a segment, and when each is said, of the times of its tokens.

A word begins at a space, or, in languages that are written without, with each character. Punctuation belongs to the
word before it, opening marks to the one behind: neither takes time of its own. (As in Whisper's own code.)
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from scheduler_service.frontend.speech.transcript import Segment

WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
_OPENING = frozenset("\"'“¿([{-")
_CLOSING = frozenset("\"'.。,，!！?？:：”)]}、")  # noqa: RUF001 (marks of Chinese and Japanese)
_APART = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
"""Marks that end a word where they stand alone in a token."""


class Word(NamedTuple):
    """Seconds count from the beginning of the window."""

    text: str
    start: float
    end: float


def timed_words(segment: Segment, times: Sequence[float], language: str, prefixes: Sequence[str]) -> list[Word]:
    """Words stay within their segment, and their texts are together the segment's.

    times: of each token of the segment, and of what follows it, never falling; prefixes: the text up to each token.
    """
    pieces = [*_characters(prefixes)]
    if language not in WITHOUT_SPACES:
        pieces = _joined_at_spaces(pieces)
    ends = [*accumulate(num_tokens for _, num_tokens in pieces)]
    starts = [0, *ends]
    words = [
        Word(text, *(min(max(times[number], segment.start), segment.end) for number in (start, end)))
        for (text, _), start, end in zip(pieces, starts, ends, strict=False)
    ]
    return _with_closing(_with_opening(words))


def _characters(prefixes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """As few tokens at a time as make whole characters: their text, and their number."""
    whole, length, num_taken = prefixes[-1], 0, 0
    for num_tokens, text in enumerate(prefixes, 1):
        # Part of a character reads otherwise than the character.
        if len(text) > length and whole.startswith(text):
            yield text[length:], num_tokens - num_taken
            length, num_taken = len(text), num_tokens


def _joined_at_spaces(pieces: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    words: list[tuple[str, int]] = []
    for text, num_tokens in pieces:
        if not words or text.startswith(" ") or text.strip() in _APART:
            words.append((text, num_tokens))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + num_tokens)
    return words


def _with_opening(words: Sequence[Word]) -> list[Word]:
    """Opening marks behind a space put before the word behind them."""
    found: list[Word] = []
    for word in reversed(words):
        if found and word.text.startswith(" ") and word.text.strip() in _OPENING:
            found[-1] = found[-1]._replace(text=word.text + found[-1].text)
        else:
            found.append(word)
    return found[::-1]


def _with_closing(words: Sequence[Word]) -> list[Word]:
    """Closing marks put behind the word before them."""
    found: list[Word] = []
    for word in words:
        if found and word.text in _CLOSING and not found[-1].text.endswith(" "):
            found[-1] = found[-1]._replace(text=found[-1].text + word.text)
        else:
            found.append(word)
    return found
