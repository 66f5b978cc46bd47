"""Computes the words of a segment with their times, from the times of its tokens.

A word begins at a space or, in languages without spaces, at each character. As in Whisper's own code, an opening mark
belongs to the next word, other punctuation to the previous word.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from scheduler_service.frontend.speech.transcript import Segment

WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
_OPENING = frozenset("\"'“¿([{-")
_CLOSING = frozenset("\"'.。,，!！?？:：”)]}、")  # noqa: RUF001 (marks of Chinese and Japanese)
_APART = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
"""Punctuation that ends the previous word if a token consists of one such mark."""


class Word(NamedTuple):
    """A word with its start and end, in seconds from the window's beginning."""

    text: str
    start: float
    end: float


def timed_words(segment: Segment, times: Sequence[float], language: str, prefixes: Sequence[str]) -> list[Word]:
    """The words of a segment, whose texts joined are the segment's text.

    `times`: the start of each token of the segment and of the next token, in ascending order. `prefixes`: the text up
    to and including each token.
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
    """The smallest groups of tokens that form whole characters: text and number of tokens."""
    whole, length, num_taken = prefixes[-1], 0, 0
    for num_tokens, text in enumerate(prefixes, 1):
        # A prefix that ends inside a character ends with a replacement character, so the text does not start with it.
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
    """Join an opening mark that follows a space to the next word."""
    found: list[Word] = []
    for word in reversed(words):
        if found and word.text.startswith(" ") and word.text.strip() in _OPENING:
            found[-1] = found[-1]._replace(text=word.text + found[-1].text)
        else:
            found.append(word)
    return found[::-1]


def _with_closing(words: Sequence[Word]) -> list[Word]:
    """Join closing marks to the previous word."""
    found: list[Word] = []
    for word in words:
        if found and word.text in _CLOSING and not found[-1].text.endswith(" "):
            found[-1] = found[-1]._replace(text=found[-1].text + word.text)
        else:
            found.append(word)
    return found
