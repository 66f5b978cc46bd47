"""The words of a segment with their times, computed from the tokens' times.

A word begins at a space, or in languages without spaces at each character. Punctuation belongs to the word before it,
opening marks to the word after: neither takes time of its own. (As in Whisper's own code.)
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from scheduler_service.frontend.speech.transcript import Segment

WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
_OPENING = frozenset("\"'“¿([{-")
_CLOSING = frozenset("\"'.。,，!！?？:：”)]}、")  # noqa: RUF001 (marks of Chinese and Japanese)
_APART = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
"""Marks that end a word if they are alone in a token."""


class Word(NamedTuple):
    """A word and its times; seconds count from the beginning of the window."""

    text: str
    start: float
    end: float


def timed_words(segment: Segment, times: Sequence[float], language: str, prefixes: Sequence[str]) -> list[Word]:
    """Words within the segment's times; their texts together are the segment's text.

    times: of each token of the segment and of the next token, never falling; prefixes: the text up to each token.
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
    """The smallest groups of tokens with whole characters: text and number of tokens."""
    whole, length, num_taken = prefixes[-1], 0, 0
    for num_tokens, text in enumerate(prefixes, 1):
        # A part of a character decodes to another text than the character.
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
    """Join opening marks after a space to the next word."""
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
