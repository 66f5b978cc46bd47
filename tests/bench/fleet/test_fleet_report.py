"""What the fleet's benchmark prints; what its parts have seen is made up here."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.fleet import __main__ as fleet
from bench.fleet import bystanders, failover, feeding, front_ends, overhead, tracing
from bench.fleet.bystanders import Bystanders
from bench.fleet.failover import Failover
from bench.fleet.feeding import Feeding
from bench.fleet.front_ends import Cost
from bench.fleet.overhead import Overhead

Rows = list[dict[str, str]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory. No part measures it."""
    (tmp_path / "config.json").write_text('{"vocab_size": 259}')
    fed = Feeding(8, 1.5, 255.0, 90_000.0, 30_000.0, 3.0, 2.5, 9.5, 1.1, 0.9, 60.0, 1.2, 1.3)
    hungry = Feeding(9, 20.0, 180.0, 95_000.0, 20_000.0, 4.75, 2.6, 9.6, 1.4, 0.8, 61.0, 1.6, 1.7)
    monkeypatch.setattr(failover, "run", lambda *_: Failover([30.0, 10.0, 20.0], [3.0, 1.0, 2.5]))
    monkeypatch.setattr(feeding, "search", lambda *_: [fed, hungry])
    monkeypatch.setattr(front_ends, "run", lambda *_: [Cost(8, 2, 1, 400.0, 20.0, 90.0, 0.4, 99.0)])
    monkeypatch.setattr(overhead, "run", lambda *given: Overhead(given[2], 100.0, 98.0, 2.0, -1.0, 3.0, 60.0, 50.0))
    monkeypatch.setattr(tracing, "run", lambda *_: tracing.Cost(33.6, 42.8, 1.27, 1.04))
    monkeypatch.setattr(bystanders, "run", lambda *_: Bystanders(300.0, 297.0, 1.0, -0.5, 2.5))
    return tmp_path


def run(model: Path, *parts: str) -> tuple[dict[str, Any], list[str]]:
    """The report, and the lines that were printed and are not blank."""
    printed = io.StringIO()
    report = fleet.run(list(parts), 32, model, Console(file=printed, width=240))
    return report, [line.strip() for line in printed.getvalue().splitlines() if line.strip()]


def rows_of(lines: list[str]) -> Rows:
    """One Markdown table's rows, each figure by its heading. Raises ValueError when a row has more or fewer of them."""
    headings, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(headings), headings  # a column beyond them would have none
    return [dict(zip(headings, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        (
            "failover",
            [
                {"ms": "kill to next token", "median": "20.0", "worst": "30.0"},
                {"ms": "recompute", "median": "2.5", "worst": "3.0"},
            ],
        ),
        (
            "feeding",
            [
                {
                    "workers": "8", "idle, %": "1.5", "sequences a step": "255.0", "tok/s": "90,000.0",
                    "messages/s": "30,000.0", "tokens a message": "3.0", "engine, µs a token": "2.5",
                    "front ends, µs a token": "9.5", "engine, cores": "1.1", "front ends, cores": "0.9",
                    "busiest of them, %": "60.0",
                    "workers, cores": "1.2", "client, cores": "1.3",
                },
                {
                    "workers": "9", "idle, %": "20.0", "sequences a step": "180.0", "tok/s": "95,000.0",
                    "messages/s": "20,000.0", "tokens a message": "4.8", "engine, µs a token": "2.6",
                    "front ends, µs a token": "9.6", "engine, cores": "1.4", "front ends, cores": "0.8",
                    "busiest of them, %": "61.0",
                    "workers, cores": "1.6", "client, cores": "1.7",
                },
            ],
        ),
        (
            "front-ends",
            [
                {
                    "streams": "8", "front ends": "2", "connections": "1", "messages/s": "400.0",
                    "engine, µs a token": "20.0", "front ends, µs a token": "90.0", "front ends, cores": "0.4",
                    "busiest of them, %": "99.0",
                }
            ],
        ),
        (
            "overhead",
            [
                {
                    "workers": number, "apart, tok/s": "100.0", "together, tok/s": "98.0", "overhead, %": "2.0",
                    "at least": "-1.0", "at most": "3.0", "scheduler apart, µs a token": "60.0",
                    "together, µs a token": "50.0",
                }
                for number in ("1", "2", "3")
            ],
        ),
        (
            "bystanders",
            [
                {
                    "alone, tok/s": "300.0", "beside, tok/s": "297.0", "slowed, %": "1.0", "at least": "-0.5",
                    "at most": "2.5",
                }
            ],
        ),
    ],
)  # fmt: skip
def test_every_figure_stands_under_its_heading(model: Path, part: str, rows: Rows) -> None:
    report, lines = run(model, part)
    assert list(report) == [part]
    assert rows_of(lines[: len(rows) + 2]) == rows


def test_a_step_on_the_wire_is_measured_as_it_is_sent(model: Path) -> None:
    report, lines = run(model, "front-ends")
    wire = report["front-ends"]["wire"]
    assert 256 * 2 < wire["num_bytes"] < 256 * 10
    assert min(wire["encode_us"], wire["decode_us"]) > 0
    (row,) = rows_of(lines[3:])
    assert row["bytes a step"] == str(wire["num_bytes"])


def test_the_report_of_all_parts_is_json(model: Path) -> None:
    report, _ = run(model, *fleet.PARTS)
    assert json.loads(json.dumps(report)) == report
    assert list(report) == list(fleet.PARTS)
    assert report["failover"] == {
        "kill_to_next_token_ms_median": 20.0,
        "kill_to_next_token_ms_worst": 30.0,
        "recompute_ms_median": 2.5,
        "recompute_ms_worst": 3.0,
    }
    assert [point["num_workers"] for point in report["feeding"]["points"]] == [8, 9]
    assert [one["num_workers"] for one in report["overhead"]] == [1, 2, 3]
    assert report["bystanders"]["slowed_percent"] == 1.0


def test_workers_that_were_idle_do_not_count_as_fed(model: Path) -> None:
    report, _ = run(model, "feeding")
    assert report["feeding"]["workers_fed"] == 8
