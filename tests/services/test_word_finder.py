"""Words are found as one regular expression of all of them would, wherever the text is cut."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.frontend.rendering import word_finder
from scheduler_service.frontend.rendering.word_finder import WordFinder

LETTERS = st.text("ab|.", min_size=1, max_size=5)


@given(words=st.lists(LETTERS, max_size=8), text=st.text("ab|.c", max_size=60))
def test_the_same_words_are_found_as_by_trying_each_of_them_longest_first(words: list[str], text: str) -> None:
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or r"(?!)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_finder, "CHARACTERS_AT_ONCE", 7)
        found = list(WordFinder(words).find(text))
    assert [word for _, word in found] == [*re.findall(pattern, text), ""]
    assert [before for before, _ in found] == re.split(pattern, text)
