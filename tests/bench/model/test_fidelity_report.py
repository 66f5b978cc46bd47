"""What the benchmark of fidelity counts, and how it reads vLLM's answers."""

import math

import pytest

from bench.loads.drive import BenchError
from bench.model.fidelity import Fidelity, Scores, compare, scores_of


def test_differences_are_averaged_over_the_tokens_of_all_texts() -> None:
    exact = [Scores([-1.0, -2.0, -3.0], [5, 6, 7]), Scores([-4.0], [8])]
    found = [Scores([-1.5, -2.0, -2.5], [5, 6, 9]), Scores([-3.0], [8])]
    nearer = 100 * (math.exp(-0.25) - 1)  # a token's mean log-probability is 0.25 larger
    assert compare(found, exact) == Fidelity(mean_difference=0.5, same_likeliest=75.0, perplexity=pytest.approx(nearer))


def test_a_text_without_all_its_scores_is_an_error() -> None:
    with pytest.raises(BenchError, match="scores of 1 tokens, not of 2"):
        compare([Scores([-1.0], [5])], [Scores([-1.0, -2.0], [5, 6])])


def test_a_token_of_the_text_need_not_be_the_likeliest_in_the_answer_of_vllm() -> None:
    entries = [
        None,
        {"11": {"logprob": -3.0, "rank": 9}, "99": {"logprob": -0.5, "rank": 1}},
        {"12": {"logprob": -0.25, "rank": 1}},
    ]
    assert scores_of(entries, [10, 11, 12]) == Scores([-3.0, -0.25], [99, 12])
