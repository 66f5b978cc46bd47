"""What is looked up is what a slow search finds."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from worker_service.speculation.ngram import draft

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def slow_guess(tokens: list[int], most: int, fewest: int, longest: int) -> list[int]:
    """The longest suffix that came before, the latest place of those; then what followed, again and again."""
    for length in range(min(longest, len(tokens) - 1), fewest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                followed = tokens[end:]
                return [followed[i % len(followed)] for i in range(most)]
    return []


@given(TOKENS, st.integers(1, 12), st.integers(1, 6), st.integers(0, 12))
@example([0, 0, 1], 1, 1, 0)
def test_a_guess_is_what_followed_the_longest_and_latest_of_what_is_alike(
    tokens: list[int], most: int, fewest: int, more: int
) -> None:
    found = draft(np.array(tokens, dtype=np.int64), most, fewest, fewest + more)
    assert found == slow_guess(tokens, most, fewest, fewest + more)


@given(TOKENS)
def test_bounds_are_two_and_sixteen_unless_told_otherwise(tokens: list[int]) -> None:
    assert draft(np.array(tokens, dtype=np.int64), 3) == slow_guess(tokens, 3, 2, 16)


def test_what_repeats_is_guessed_to_repeat() -> None:
    assert draft(np.array([9, 1, 2, 3, 1, 2, 3]), 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_guessed_of_what_is_new() -> None:
    assert draft(np.arange(50), 4) == []
    assert draft(np.array([5]), 4) == []
    assert draft(np.array([], dtype=np.int64), 4) == []
    assert draft(np.array([1, 2, 1, 2]), 0) == []
