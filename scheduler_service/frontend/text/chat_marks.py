"""Keeps special tokens in users' messages apart from those of the chat template.

Before the template runs, each special token in a message is replaced by a mark: a random string with the token's
number. After rendering, the special token behind each mark is encoded as plain text.
"""

import secrets
from collections.abc import Iterator

from scheduler_service.frontend.text.encoding_errors import TemplateError, TooManyTokensError
from scheduler_service.frontend.text.word_finder import WordFinder

_END = "\ue001"


class ChatMarks:
    """The marks of one chat, whose messages may contain at most `most` special tokens."""

    def __init__(self, special: WordFinder, most: int) -> None:
        self._special, self._most = special, most
        self._begin = f"\ue000{secrets.randbelow(10**18)}:"
        self._marks: dict[str, str] = {}
        self._num_found = 0

    @property
    def words(self) -> list[str]:
        """The replaced special tokens, in the order of the numbers in the marks."""
        return list(self._marks)

    @property
    def longest(self) -> int:
        """Characters of the longest mark; 0 without marks."""
        return max(map(len, self._marks.values()), default=0)

    def hide(self, text: str) -> str:
        parts: list[str] = []
        for before, word in self._special.find(text):
            parts.append(before)
            if word:
                parts.append(self._marks.setdefault(word, f"{self._begin}{len(self._marks)}{_END}"))
                self._num_found += 1
                if self._num_found > self._most:  # each special token is encoded as at least one token
                    raise TooManyTokensError
        return "".join(parts)

    def show(self, text: str) -> str:
        for word, mark in self._marks.items():
            text = text.replace(mark, word)
        return text

    def pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut a rendered chat at its marks: pairs of a piece of text and the number of the mark behind it, or None.

        Creating and freeing 100,000 strings at once would take long. Raises TemplateError.
        """
        start = 0
        while (found := text.find(self._begin, start)) >= 0:
            end = text.find(_END, found)
            number = text[found + len(self._begin) : max(end, 0)]
            if not (number.isdecimal() and int(number) < len(self._marks)):
                raise TemplateError("the model's chat template cuts messages that spell out special tokens")
            yield text[start:found], int(number)
            start = end + len(_END)
        yield text[start:], None
