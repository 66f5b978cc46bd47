"""What a run on a GPU writes down, and the tables of it."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from bench.gpu.rows import Row, append_row, figures_table, limits_table, read_rows
from bench.loads.drive import BenchError

OURS = Row(
    device="H200", copy_bytes_per_second=4e12, model="llama-8b", load="128/128 x 32", concurrency=32,
    system="pagewire", start_seconds=20.0, output_tokens_per_second=3000.0, ttft_ms=40.0, ttft_p99_ms=90.0,
    itl_p50_ms=6.1, itl_p99_ms=9.0, step_ms=6.0, limit_ms=4.0, idle_percent=3.25, idle_us=190.0,
)  # fmt: skip
THEIRS = replace(OURS, system="vLLM 9", output_tokens_per_second=2000.0, step_ms=8.0, idle_percent=None, idle_us=None)


def cells(table: Table) -> list[list[str]]:
    """The lines of a table without its heading."""
    out = io.StringIO()
    Console(file=out, width=250).print(table)
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_row_that_was_written_can_be_read_from_a_run_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for row in (OURS, THEIRS):
        append_row(file, row)
    with open(file, "a") as cut_off:
        cut_off.write('{"device": "H2')
    assert read_rows(file) == [OURS, THEIRS]


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"device": "H200"}\n')
    with pytest.raises(BenchError, match=r"rows\.jsonl, line 1 is not of bench serve_gpu"):
        read_rows(tmp_path / "rows.jsonl")


def test_ours_comes_first_and_the_ratio_is_our_rate_over_the_others() -> None:
    rows = cells(figures_table([THEIRS, OURS]))
    assert [row[2:5] for row in rows] == [["pagewire", "3,000", ""], ["vLLM 9", "2,000", "1.50"]]


def test_what_is_not_known_of_a_system_is_said_so() -> None:
    rows = cells(figures_table([OURS, THEIRS]))
    assert [row[-2:] for row in rows] == [["3.2%", "190"], ["not known", "not known"]]


def test_a_load_that_was_measured_again_is_shown_once_as_it_was_last() -> None:
    rows = cells(figures_table([OURS, replace(OURS, output_tokens_per_second=3100.0)]))
    assert [row[3] for row in rows] == ["3,100"]


def test_a_decode_step_is_compared_with_its_limit_only_where_decodes_are_most_of_the_steps() -> None:
    rows = cells(limits_table([OURS, THEIRS, replace(OURS, load="8192/256 x 32", step_ms=None, limit_ms=None)]))
    assert [row[1:] for row in rows] == [
        ["32", "pagewire", "4,000", "4.00", "6.00", "1.50"],
        ["32", "vLLM 9", "4,000", "4.00", "8.00", "2.00"],
    ]
