"""Finds any of many words in any text, without holding the interpreter's lock for long.

The words become one regular expression in which words share common beginnings. So a text full of beginnings costs no
more for a thousand words than for one. Python's `re` holds the interpreter's lock for a whole call, so each call
searches only a part of the text.
"""

import re
from collections.abc import Iterable, Iterator

CHARACTERS_AT_ONCE = 1 << 14
"""Characters of one call: a millisecond or two for a text full of words' beginnings."""

_Trie = dict[str, "_Trie"]
_END = ""


class WordFinder:
    """If several words begin at the same place, the longest is found."""

    def __init__(self, words: Iterable[str]) -> None:
        trie: _Trie = {}
        self._longest = 1
        for word in filter(None, words):
            self._longest = max(self._longest, len(word))
            node = trie
            for character in word:
                node = node.setdefault(character, {})
            node[_END] = {}
        self._pattern = re.compile(_expression(trie) if trie else r"(?!)")

    def find(self, text: str) -> Iterator[tuple[str, str]]:
        """The words in a text, each with the text before it; finally the rest of the text, without a word."""
        start = position = 0
        while position < len(text):
            next_position = position + CHARACTERS_AT_ONCE
            match = self._pattern.search(text, position, next_position + self._longest)
            if match is None:
                position = next_position
            elif match.start() >= next_position:  # a longer word may be cut off
                position = match.start()
            else:
                yield text[start : match.start()], match.group()
                start = position = match.end()
        yield text[start:], ""


def _expression(trie: _Trie) -> str:
    """A regular expression for the longest of a trie's words."""
    literal = ""
    while len(trie) == 1 and _END not in trie:
        ((character, trie),) = trie.items()
        literal += re.escape(character)
    branches = "|".join(re.escape(character) + _expression(rest) for character, rest in trie.items() if character)
    if not branches:
        return literal
    return f"{literal}(?:{branches})" + ("?" if _END in trie else "")
