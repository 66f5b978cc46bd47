import pytest

from bench.loads.figures import Run, Timeline, median_interval, percentile, summarise


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (99, 99), (99.1, 100), (100, 100)]
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, value: int) -> None:
    assert percentile(range(100, 0, -1), percent) == value


def test_the_99th_percentile_of_few_values_is_their_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([7.0], 99) == 7.0


def test_every_token_of_a_message_is_charged_the_whole_pause_before_it() -> None:
    timeline = Timeline(10.0, 5, [(11.0, 2), (11.5, 1), (14.5, 3)])
    assert timeline.ttft == 1.0
    assert timeline.output_tokens == 6
    assert timeline.tpot == 3.5 / 5
    assert timeline.pauses() == [0.5, 3.0, 3.0, 3.0]


def test_one_token_has_no_time_for_each_further_one() -> None:
    timeline = Timeline(0.0, 5, [(1.0, 1)])
    assert timeline.tpot is None
    assert timeline.pauses() == []


def test_mean_pauses_are_those_of_steps_although_messages_come_together() -> None:
    at_once = Timeline(0.0, 5, [(1.0, 1), (1.9, 2), (1.9, 1), (2.5, 1), (2.5, 2), (9.0, 1)])
    assert at_once.mean_pauses(3) == [pytest.approx(0.9 / 3), pytest.approx(0.6 / 3)]
    assert at_once.mean_pauses(8) == []


def test_the_figures_of_several_runs_are_those_of_all_their_requests() -> None:
    first = Run(2.0, [Timeline(0.0, 100, [(0.5, 1), (1.0, 1), (2.0, 1)])])
    second = Run(6.0, [Timeline(50.0, 60, [(50.1, 1), (50.3, 4)]), Timeline(50.0, 40, [(50.2, 1)])])
    figures = summarise([first, second], memory_mib=7.0)
    assert figures.output_tokens_per_second == 9 / 8
    assert figures.total_tokens_per_second == (9 + 200) / 8
    assert figures.ttft_ms == pytest.approx(200)
    assert figures.ttft_p99_ms == pytest.approx(500)
    assert figures.tpot_ms == pytest.approx((750 + 50) / 2)
    assert figures.itl_p50_ms == pytest.approx(200)
    assert figures.itl_p99_ms == pytest.approx(1000)
    assert figures.memory_mib == 7.0


@pytest.mark.parametrize(("size", "rank"), [(6, 1), (12, 3), (20, 6), (100, 40)])
def test_the_interval_of_a_median_leaves_out_as_many_values_as_the_sign_test_allows(size: int, rank: int) -> None:
    """Ranks as in tables of the sign test for 95%."""
    assert median_interval(range(size, 0, -1)) == (rank, size + 1 - rank)


def test_five_values_do_not_tell_a_median_with_95_percent() -> None:
    with pytest.raises(ValueError, match="5 values"):
        median_interval(range(5))
