"""Special tokens in users' messages, distinguished from the chat template's own.

Before the template runs, they are replaced by marks that no text contains. In the rendered chat, the marks are encoded
as plain text. Each mark has the number of its token, because a template may move, repeat and drop messages.
"""

import secrets
from collections.abc import Iterator

from scheduler_service.frontend.text.encoding_errors import TemplateError, TooManyTokensError
from scheduler_service.frontend.text.word_finder import WordFinder

_END = "\ue001"


class ChatMarks:
    """The marks of one chat, in which users spell at most `most` special tokens."""

    def __init__(self, special: WordFinder, most: int) -> None:
        self._special, self._most = special, most
        self._begin = f"\ue000{secrets.randbelow(10**18)}:"
        self._marks: dict[str, str] = {}
        self._num_found = 0

    @property
    def words(self) -> list[str]:
        """The special tokens, by the numbers of their marks."""
        return list(self._marks)

    @property
    def longest(self) -> int:
        """Characters of the longest mark, 0 if there is none."""
        return max(map(len, self._marks.values()), default=0)

    def hide(self, text: str) -> str:
        """A message with marks for its special tokens. Raises TooManyTokensError."""
        parts: list[str] = []
        for before, word in self._special.find(text):
            parts.append(before)
            if word:
                parts.append(self._marks.setdefault(word, f"{self._begin}{len(self._marks)}{_END}"))
                self._num_found += 1
                if self._num_found > self._most:  # each takes at least one token
                    raise TooManyTokensError
        return "".join(parts)

    def show(self, text: str) -> str:
        """A template's text with the tokens in place of the marks."""
        for word, mark in self._marks.items():
            text = text.replace(mark, word)
        return text

    def pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        """A rendered chat cut at its marks: each piece with the number of the mark after it, the last with None.

        A generator, because a hundred thousand strings take long to create at once, and to free. Raises TemplateError.
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
