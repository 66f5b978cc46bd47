"""What is looked up is what a slow search finds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_service.speculation.ngram import FEWEST, MOST, draft

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def slow_guess(tokens: list[int], most: int) -> list[int]:
    """The longest suffix that came before, the latest place of those; then what followed, again and again."""
    for length in range(min(MOST, len(tokens) - 1), FEWEST - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                followed = tokens[end:]
                return [followed[i % len(followed)] for i in range(most)]
    return []


@given(TOKENS, st.integers(1, 12))
def test_a_guess_is_what_followed_the_longest_and_latest_of_what_is_alike(tokens: list[int], most: int) -> None:
    assert draft(np.array(tokens, dtype=np.int64), most) == slow_guess(tokens, most)


def test_what_repeats_is_guessed_to_repeat() -> None:
    assert draft(np.array([9, 1, 2, 3, 1, 2, 3]), 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_guessed_of_what_is_new() -> None:
    assert draft(np.arange(50), 4) == []
    assert draft(np.array([5]), 4) == []
    assert draft(np.array([], dtype=np.int64), 4) == []
    assert draft(np.array([1, 2, 1, 2]), 0) == []
