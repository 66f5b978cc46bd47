"""Reported log-probabilities are those of the plain softmax, likeliest first."""

import pytest
import torch
from worker_helpers import state

from worker_service.execution.sampling.logprobs import check_finite, concatenate, gather_logprobs, sample_logprobs


def test_columns_hold_the_token_then_the_likeliest() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    token_ids = torch.tensor([3, 29, 0, 7])
    report = gather_logprobs(logits, token_ids, 9, 5)
    assert (report.sequence_id, report.width) == (9, 6)
    for row, token_id in enumerate(token_ids.tolist()):
        expected = logits[row].log_softmax(0)
        order = expected.argsort(descending=True).tolist()
        ids = report.token_ids[row * 6 : row * 6 + 6]
        assert ids == [token_id, *order[:5]]
        assert report.ranks[row] == order.index(token_id) + 1
        torch.testing.assert_close(torch.tensor(report.logprobs[row * 6 : row * 6 + 6]), expected[ids])


def test_equally_likely_tokens_are_in_order_and_share_a_rank() -> None:
    logits = torch.zeros(1, 6)
    logits[0, [4, 2, 5]] = 1.0
    report = gather_logprobs(logits, torch.tensor([5]), 1, 3)
    assert report.token_ids == [5, 2, 4, 5]
    assert report.ranks == [1]


def test_what_is_all_but_impossible_has_a_finite_log_probability() -> None:
    """JSON could not say it otherwise."""
    logits = torch.tensor([[0.0, -torch.inf, -1e4, 3e38, -3e38]])
    assert gather_logprobs(logits[:, :3], torch.tensor([1]), 1, 3).logprobs == [-9999.0, 0.0, -9999.0, -9999.0]
    assert gather_logprobs(logits, torch.tensor([4]), 1, 1).logprobs == [-9999.0, 0.0]


def test_zero_reports_the_token_alone() -> None:
    report = gather_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), 1, 0)
    assert (report.width, report.token_ids) == (1, [1, 2])


def test_each_sequence_has_a_report_of_its_own_rows() -> None:
    """In order, though rows that ask for the same number are computed together."""
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6]
    asked = [(1, range(1, 4), 1), (2, range(4, 5), 0), (3, range(5, 7), 1), (4, range(7, 8), 2)]
    reports = sample_logprobs(
        logits, token_ids, [(state([1], sequence_id=number, logprobs=top), rows) for number, rows, top in asked]
    )
    assert reports == [
        gather_logprobs(logits[rows.start : rows.stop], torch.tensor(token_ids[rows.start : rows.stop]), number, top)
        for number, rows, top in asked
    ]


def test_parts_join_in_order() -> None:
    logits = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    token_ids = torch.arange(7)
    whole = gather_logprobs(logits, token_ids, 1, 2)
    assert whole == concatenate(
        [gather_logprobs(logits[:3], token_ids[:3], 1, 2), gather_logprobs(logits[3:], token_ids[3:], 1, 2)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "row", [[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [torch.inf, -torch.inf, torch.nan], [-torch.inf] * 3]
)
def test_a_row_without_log_probabilities_is_found_among_others(row: list[float], dtype: torch.dtype) -> None:
    sound = [[0.0, -torch.inf, 1.0], [3e38, 1.0, -3e38]]
    check_finite(torch.tensor(sound, dtype=dtype))
    with pytest.raises(FloatingPointError):
        check_finite(torch.tensor([*sound, row, *sound], dtype=dtype))
