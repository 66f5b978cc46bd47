"""A model's text as readers consume it: readers are generators that pause when they need more text.

A reader decides only on text that no later text can change, so a reader's events do not depend on how the text is cut.
A position in the text is valid across a pause only while the tape holds it (`hold`), because consumed text is deleted.
"""

import re
from collections.abc import Generator, Iterable
from functools import lru_cache

Pause = Generator[None, None, None]
Reader = Generator[None, None, bool]
"""A reader that returns whether the text had the expected form."""

SPACE = " \t\r\n"
MAX_SPACE = 64
"""Largest number of whitespace characters between two parts of a tool call."""
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


class MarkFinder:
    """Finds marks in a text. If several marks begin at the same place, the longest mark is found."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = frozenset(marks)
        self._lengths = sorted({len(mark) for mark in self._marks}, reverse=True)
        self._prefixes = frozenset(mark[:end] for mark in self._marks for end in range(1, len(mark)))
        first = "".join(re.escape(character) for character in sorted({mark[0] for mark in self._marks}))
        self._first = re.compile(f"[{first}]" if first else "(?!)")
        self._longest = max(self._lengths, default=0)

    def find(self, text: str, start: int, *, is_whole: bool) -> tuple[int, str]:
        """The place of the first mark, and the mark.

        Without a mark, the place is the end of the text that no longer text can turn into a mark.
        """
        while match := self._first.search(text, start):
            start = match.start()
            if not is_whole and len(text) - start < self._longest and text[start:] in self._prefixes:
                return start, ""
            for length in self._lengths:
                if (piece := text[start : start + length]) in self._marks:
                    return start, piece
            start += 1
        return len(text), ""


@lru_cache(maxsize=256)
def mark_finder(marks: frozenset[str]) -> MarkFinder:
    """The finder of a set of marks, cached because every chat of a model has the same marks."""
    return MarkFinder(marks)


class Tape:
    """The text so far. Readers move `at` forward over text that they have consumed."""

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.is_whole = False
        self.was_cut = False
        """Whether the text ended inside a part that a reader expected."""
        self._holds = False

    def add(self, text: str) -> None:
        if self._holds:
            self.text += text
        else:
            self.text, self.at = self.text[self.at :] + text, 0

    def hold(self) -> int:
        """Keep positions from here on valid across pauses, until `release`. Returns the current position."""
        if not self._holds:
            self.text, self.at, self._holds = self.text[self.at :], 0, True
        return self.at

    def release(self) -> None:
        self._holds = False

    def skip_rest(self) -> None:
        """Consume the rest of a text that was cut."""
        self.at = len(self.text)

    def peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end of the whole text."""
        while self.at >= len(self.text) and not self.is_whole:
            yield
        if self.at >= len(self.text):
            self.was_cut = True
        return self.text[self.at : self.at + 1]

    def literal(self, word: str) -> Reader:
        """Consume a word if it comes next."""
        while True:
            piece = self.text[self.at : self.at + len(word)]
            if piece == word:
                self.at += len(word)
                return True
            if not word.startswith(piece):
                return False
            if self.is_whole:
                self.was_cut = True
                return False
            yield

    def space(self) -> Pause:
        """Consume whitespace, at most `MAX_SPACE` characters."""
        for _ in range(MAX_SPACE):
            character = yield from self.peek()
            if not character or character not in SPACE:
                return
            self.at += 1

    def skip_all_space(self) -> Pause:
        """Consume whitespace of any length."""
        while True:
            match = _NOT_SPACE.search(self.text, self.at)
            self.at = match.start() if match else len(self.text)
            if match or self.is_whole:
                return
            yield

    def until(self, stops: str, most: int, words: Iterable[str] | None = None) -> Generator[None, None, str | None]:
        """Consume text up to one of the characters `stops`, which is not consumed.

        Returns None, and consumes nothing, if the text is longer than `most` characters or ends, or if no word of
        `words` begins with the text.
        """
        length = 0
        while True:
            while self.at + length < len(self.text):
                if self.text[self.at + length] in stops:
                    self.at += length
                    return self.text[self.at - length : self.at]
                length += 1
                if length > most:
                    return None
            text = self.text[self.at :]
            if words is not None and not any(word.startswith(text) for word in words):
                return None
            if self.is_whole:
                self.was_cut = True
                return None
            yield
