"""The figure of simulated runs: what is drawn, the file, and what happens where nothing can be drawn."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler_service import simulate
from scheduler_service.core import PriorityQueue
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.plot import count, draw
from scheduler_service.simulation.simulator import Simulator
from scheduler_service.simulation.trace import Arrival

BURST = [Arrival(number * 0.01, 20 + number % 30, 1 + number * 7 % 40, priority=-(number % 2)) for number in range(60)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:{s:02},{20 + s},{5 + s % 9}\n" for s in range(40))
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return file


def test_every_policy_has_a_labelled_curve_in_every_panel() -> None:
    results = {
        "fcfs": Simulator(BURST, CostModel(max_num_seqs=4), num_workers=1).run(),
        "priority": Simulator(BURST, CostModel(max_num_seqs=4), num_workers=1, waiting=PriorityQueue()).run(),
    }
    figure = draw(results, "a burst")
    latency, tails, waiting, running = figure.axes
    for axes in figure.axes:
        one, other = axes.get_lines()
        assert str(one.get_label()).startswith("fcfs")
        assert str(other.get_label()).startswith("priority")
        assert one.get_color() != other.get_color()
        assert list(one.get_xdata()) != list(other.get_xdata())
    assert latency.get_xscale() == "log"
    assert [text.get_text().split(",")[0] for text in latency.get_legend().get_texts()] == ["fcfs", "priority"]
    for curve in latency.get_lines():
        shares = list(curve.get_ydata())
        assert all(before <= after for before, after in pairwise(shares))
        assert shares[-1] == 1
    assert [text.get_text() for text in tails.get_yticklabels()] == ["all", "priority -1", "priority 0"]
    assert tails.get_lines()[1].get_xdata()[1] < tails.get_lines()[0].get_xdata()[1] / 1.5  # the urgent, by priority
    assert max(running.get_lines()[0].get_ydata()) == 4
    assert max(waiting.get_lines()[0].get_ydata()) > 20
    assert waiting.get_lines()[0].get_ydata()[-1] == running.get_lines()[0].get_ydata()[-1] == 0


def test_without_several_tenants_or_priorities_there_is_no_panel_of_kinds() -> None:
    arrivals = [arrival._replace(priority=0) for arrival in BURST]
    figure = draw({"fcfs": Simulator(arrivals, CostModel(), num_workers=1).run()}, "a burst")
    assert len(figure.axes) == 3


def test_spans_are_counted_while_they_last() -> None:
    assert count([1.0, 2.0, 2.0], [2.0, 5.0, 6.0]) == ([0.0, 1.0, 2.0, 5.0, 6.0], [0, 1, 2, 1, 0])


def test_the_command_writes_a_picture_without_a_display(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "figure.png"
    command = [sys.executable, "-m", "scheduler_service.simulate", "--trace", str(trace), "--plot", str(picture)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PATH": "", "HOME": str(tmp_path)}
    )
    assert result.returncode == 0, result.stderr
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert [int.from_bytes(data[start : start + 4], "big") for start in (16, 20)] == [1800, 900]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("figure.doc", "it must end in one of .*png"), ("nowhere/figure.png", "there is no folder .*nowhere")],
)
def test_a_figure_that_cannot_be_written_is_refused_before_anything_runs(
    name: str, reason: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", "--trace", str(trace), "--plot", str(tmp_path / name)])
    monkeypatch.setattr(simulate, "Simulator", None)
    with pytest.raises(SystemExit, match=reason):
        simulate.main()


def test_without_matplotlib_all_else_works_and_plot_names_the_command_that_installs_it(trace: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from scheduler_service.simulate import main; main()"
    command = [sys.executable, "-c", code, "--trace", str(trace), "--scheduling-policy", "fcfs"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    refused = subprocess.run([*command, "--plot", "figure.png"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr == (
        "scheduler_service.simulate: --plot needs matplotlib, which pip install -e '.[plot]' installs\n"
    )
