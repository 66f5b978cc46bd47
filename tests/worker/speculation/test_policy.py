"""Guesses are verified where that makes tokens come faster, and nowhere else."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_service.speculation.policy import StepCost, numbers_of_drafts


def cost_of(fixed: float, each: float) -> StepCost:
    """Of a machine that takes so many seconds for a step, and for each of its tokens."""
    cost, draw = StepCost(each), Random(1)
    for _ in range(200):
        num_tokens = draw.randrange(1, 40)
        cost.observe(num_tokens, fixed + each * num_tokens)
    return cost


def rate(
    numbers: list[int],
    chances: list[float],
    shares: list[float],
    cost: StepCost,
    pause: float,
    guessing: StepCost | None = None,
) -> float:
    """Tokens a second that are to be expected."""
    gained = len(chances) + sum(
        share * chance**j
        for number, chance, share in zip(numbers, chances, shares, strict=True)
        for j in range(1, number + 1)
    )
    seconds = cost.of(len(chances) + sum(numbers)) + (pause if any(numbers) else 0)
    if guessing is not None:
        passes = [sum(number >= j for number in numbers) for j in range(1, max(numbers) + 1)]
        seconds += sum(guessing.of(rows) for rows in passes)
    return gained / seconds


def test_a_cost_is_learnt() -> None:
    cost = cost_of(0.020, 0.001)
    assert cost.slope == pytest.approx(0.001, rel=0.01)
    assert cost.of(1) == pytest.approx(0.021, rel=0.01)
    for num_tokens in (1, 20) * 60:  # the machine has become slower
        cost.observe(num_tokens, 0.060 + 0.004 * num_tokens)
    assert cost.slope == pytest.approx(0.004, rel=0.05)
    assert cost.of(10) == pytest.approx(0.100, rel=0.05)


def test_before_there_is_anything_to_learn_from_the_slope_is_that_of_prompts() -> None:
    cost = StepCost(0.002)
    assert cost.slope == 0.002
    for _ in range(50):
        cost.observe(4, 0.030)  # steps of one size say nothing of it
    assert cost.slope == pytest.approx(0.002)
    assert cost.of(4) == pytest.approx(0.030)


def test_where_memory_is_the_limit_all_likely_guesses_are_verified() -> None:
    assert numbers_of_drafts([0.9], [8], cost_of(0.030, 0.0001), 0.002) == [8]


def test_where_computing_is_the_limit_none_is() -> None:
    assert numbers_of_drafts([0.95] * 32, [8] * 32, cost_of(0.0001, 0.005), 0.002) == [0] * 32


def test_a_pause_that_costs_more_than_the_guesses_bring_is_not_made() -> None:
    cost = cost_of(0.030, 0.0001)
    assert numbers_of_drafts([0.9] + [0.0] * 7, [4] * 8, cost, 0.001) == [4] + [0] * 7
    assert numbers_of_drafts([0.9] + [0.0] * 7, [4] * 8, cost, 0.040) == [0] * 8


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=3),
    st.floats(1e-4, 0.1),
    st.floats(1e-5, 0.05),
    st.floats(0, 0.05),
    st.none() | st.tuples(st.floats(1e-4, 0.05), st.floats(1e-5, 0.01)),
)
def test_no_other_numbers_are_faster(
    rows: list[tuple[float, int, float]],
    fixed: float,
    each: float,
    pause: float,
    pass_seconds: tuple[float, float] | None,
) -> None:
    cost = cost_of(fixed, each)
    guessing = cost_of(*pass_seconds) if pass_seconds else None
    chances, mosts, shares = (list(column) for column in zip(*rows, strict=True))
    numbers = numbers_of_drafts(chances, mosts, cost, pause, shares=shares, drafting=guessing)
    fastest = max(
        rate(list(others), chances, shares, cost, pause, guessing)
        for others in itertools.product(*(range(most + 1) for most in mosts))
    )
    assert rate(numbers, chances, shares, cost, pause, guessing) >= fastest * (1 - 1e-9)


def test_there_is_no_room_where_there_is_hardly_ever_a_guess() -> None:
    cost = cost_of(0.030, 0.001)
    assert numbers_of_drafts([0.9] * 2, [2] * 2, cost, 0.0, shares=[1.0, 0.02]) == [2, 0]


def test_a_draft_model_that_is_slow_makes_few_guesses_or_none() -> None:
    cost = cost_of(0.030, 0.0001)
    assert numbers_of_drafts([0.8], [8], cost, 0.0, drafting=cost_of(0.001, 0.0001)) == [8]
    assert numbers_of_drafts([0.8], [8], cost, 0.0, drafting=cost_of(0.010, 0.0001)) == [3]
    assert numbers_of_drafts([0.8], [8], cost, 0.0, drafting=cost_of(0.030, 0.0001)) == [0]


def test_nothing_is_asked_for_nothing() -> None:
    assert numbers_of_drafts([], [], cost_of(0.01, 0.001), 0.0) == []
