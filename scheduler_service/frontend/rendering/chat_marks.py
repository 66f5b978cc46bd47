"""Keeps special tokens in clients' texts apart from special tokens of the chat template.

Before the chat template runs, each special token in a text is replaced by a mark. After rendering, the special token
behind each mark is encoded as plain text. A mark contains the number of its special token, because a template may move,
repeat and drop texts.

A mark is a number between two characters that occur neither in the chat nor in the template. The two characters are
rare ideographs: unlike private characters, ideographs have no case, count as printable, and stay as they are in JSON
(chat_template.py), in Python's `repr` and in HTML.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scheduler_service.frontend.rendering.encoding_errors import TemplateError, TooManyTokensError
from scheduler_service.frontend.rendering.word_finder import WordFinder

_FIRST, _NUM_CHARACTERS = 0x3400, 6592  # the block "CJK Unified Ideographs Extension A"


class SpecialTokens:
    """The special tokens of a model. The number of a special token is its index in `words`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.numbers = {word: number for number, word in enumerate(words)}
        self.finder = WordFinder(words)


class ChatMarks:
    """The marks in one chat, which may contain at most `most` special tokens.

    `begin`, `end`: the first and the last character of each mark.
    `num_found`: number of special tokens in the texts that were hidden.
    `clashes`: `begin` or `end` occurs in a text, so that marks would be ambiguous.
    """

    def __init__(self, special: SpecialTokens, template: str, most: int) -> None:
        self._special, self._most = special, most
        begin = secrets.randbelow(_NUM_CHARACTERS)
        end = (begin + 1 + secrets.randbelow(_NUM_CHARACTERS - 1)) % _NUM_CHARACTERS
        self.begin, self.end = chr(_FIRST + begin), chr(_FIRST + end)
        self.num_found = 0
        self.clashes = False
        self._note(template)

    @property
    def last(self) -> str:
        """The mark behind the content that the output continues."""
        return self.begin + self.end

    def hide(self, text: str) -> str:
        """Replace the special tokens in a text by marks. Raises TooManyTokensError."""
        self._note(text)
        parts: list[str] = []
        for before, word in self._special.finder.find(text):
            parts.append(before)
            if word:
                parts.append(f"{self.begin}{self._special.numbers[word]}{self.end}")
                self.num_found += 1
                if self.num_found > self._most:  # each special token is encoded as at least one token
                    raise TooManyTokensError
        return "".join(parts)

    def spells_special(self, text: str) -> bool:
        """Whether a text, whose special tokens are hidden, spells another one."""
        return any(word for _, word in self._special.finder.find(text))

    def show(self, text: str) -> str:
        """Replace the marks in a template's message by their special tokens."""
        return MarkedText(text, self.begin, self.end, self._special.words).shown(text)

    def _note(self, text: str) -> None:
        if self.begin in text or self.end in text:
            self.clashes = True


class MarkedText(NamedTuple):
    """A rendered chat. `begin` and `end` are the characters of its marks; they are empty if the text has no marks."""

    text: str
    begin: str = ""
    end: str = ""
    words: Sequence[str] = ()

    def pieces(self) -> Iterator[tuple[str, int | None]]:
        """Cut the text at its marks, into pairs of a piece of text and the number of the special token behind it.

        The number of the last pair is None. `pieces` is a generator, because creating and freeing 100,000 strings at
        once takes long. Raises TemplateError if the template has cut a mark.
        """
        text, begin, end = self.text, self.begin, self.end
        start = 0
        while begin and (found := text.find(begin, start)) >= 0:
            stop = text.find(end, start)
            number = text[found + 1 : max(stop, 0)]
            if not (number.isdecimal() and len(number) < 10 and int(number) < len(self.words)):
                raise changed_marks()
            yield text[start:found], int(number)
            start = stop + 1
        if begin and text.find(end, start) >= 0:
            raise changed_marks()
        yield text[start:], None

    def tail(self, num_characters: int) -> str:
        """About the last `num_characters` characters, with special tokens in place of marks."""
        tail = self.text[-num_characters:]
        if not self.begin:
            return tail
        stop, found = tail.find(self.end), tail.find(self.begin)
        return self.shown(tail[stop + 1 :] if stop >= 0 and not 0 <= found < stop else tail)

    def shown(self, text: str) -> str:
        """Replace the marks in a part of the text by their special tokens. A mark that was cut stays as it is."""
        parts: list[str] = []
        start = 0
        while (found := text.find(self.begin, start)) >= 0:
            stop = text.find(self.end, found)
            number = text[found + 1 : max(stop, 0)]
            if not (number.isdecimal() and len(number) < 10 and int(number) < len(self.words)):
                break
            parts += text[start:found], self.words[int(number)]
            start = stop + 1
        return "".join(parts) + text[start:]


def changed_marks() -> TemplateError:
    return TemplateError("the model's chat template cuts or changes texts that spell out special tokens")
