import io
import json

import pytest
from rich.console import Console

from bench.loads.figures import Figures, Run, Timeline
from bench.loads.load import LOADS
from bench.measurements import chart
from bench.measurements.measure import Measurement
from bench.measurements.phases import PHASES, Split, split_between
from bench.measurements.report import Report
from pagewire.v1.admin_service_pb2 import StepSplit

LOAD = LOADS[2]


def figures(rate: float) -> Figures:
    return Figures(rate, 2 * rate, 100.0, 200.0, 10.0, 9.0, 20.0, 512.0)


@pytest.fixture
def report() -> Report:
    run = Run(2.0, [Timeline(0.0, 8, [(1.0, 1), (2.0, 1)])])
    report = Report("vLLM 9", {}, {"pagewire": 4.0, "vLLM": 80.0})
    split = Split(100, dict.fromkeys(PHASES, 1.0) | {"forward": 90.0})
    measurement = Measurement(
        runs={"pagewire": [run], "vLLM": [run]},
        figures={"pagewire": figures(300), "vLLM": figures(200)},
        idle_cpu_percent={"vLLM": 0.7, "pagewire": 0.1},
        split=split,
    )
    report.add(LOAD, measurement)
    return report


def test_the_split_is_a_mean_over_the_steps_between_the_readings() -> None:
    readings = [
        (StepSplit(num_steps=1, forward_us=1000, wire_us=50), StepSplit(num_steps=3, forward_us=3000, wire_us=60)),
        (StepSplit(num_steps=9, forward_us=9000, wire_us=70), StepSplit(num_steps=11, forward_us=9200, wire_us=100)),
    ]
    split = split_between(readings)
    assert split.num_steps == 4
    assert split.us == dict.fromkeys(PHASES, 0.0) | {"forward": 550.0, "wire": 10.0}


def test_whatever_is_not_the_model_is_overhead() -> None:
    us = dict.fromkeys(PHASES, 1.0) | {"move": 10.0, "images": 5.0, "forward": 65.0, "sample": 10.0, "guess": 4.0}
    assert Split(1, us).overhead_percent == pytest.approx(6.0)


def test_a_device_is_idle_for_the_part_of_a_step_in_which_it_is_in_none_of_the_models_phases() -> None:
    us = dict.fromkeys(PHASES, 1000.0) | {"move": 10.0, "images": 5.0, "forward": 65.0, "sample": 10.0, "guess": 4.0}
    assert Split(50, us).model_us == 94
    assert Split(50, us).idle_us(seconds=0.005) == pytest.approx(100 - 94)


def test_ratios_are_ours_over_theirs(report: Report) -> None:
    answer = json.loads(json.dumps(report.as_json()))
    assert answer["ratios"] == {LOAD.title: 1.5}
    assert answer["all_ratios"][LOAD.title]["ttft_ms"] == 1.0
    assert answer["rounds"][LOAD.title] == {"pagewire": [1.0], "vLLM": [1.0]}
    assert answer["steps"][LOAD.title]["overhead_percent"] == pytest.approx(8 - 2)


def test_a_peer_with_fewer_figures_is_compared_by_those() -> None:
    report = Report("transformers", {}, {})
    report.add(LOAD, Measurement(figures={"pagewire": figures(300)}))
    report.theirs[LOAD.title] = {"output_tokens_per_second": 100.0}
    assert report.as_json()["all_ratios"] == {LOAD.title: {"output_tokens_per_second": 3.0}}


def test_the_tables_are_markdown(report: Report) -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(report.figures_table(), report.steps_table())
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.getvalue().splitlines() if "|" in line]
    assert [LOAD.title, "pagewire", "300.0", "600", "100", "200", "10.0", "20.0", "512"] in lines
    assert ["", "ratio", "1.50", "1.50", "1.00", "1.00", "1.00", "1.00", "1.00"] in lines
    assert any(set("".join(line)) == {"-"} for line in lines)
    assert report.sentences()[2] == (
        "Under 128/128 x 32, 6.0% of a step are scheduler, codec and gRPC (target: at most 5%)."
    )


def test_the_chart_has_a_bar_for_each_and_the_ratio_above(report: Report) -> None:
    (axes,) = chart.draw(report).axes
    assert [bar.get_height() for bar in axes.patches] == [300, 200]
    assert [text.get_text() for text in axes.texts] == ["1.50 x"]
