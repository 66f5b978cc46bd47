"""Writes the figures of each load on each system as a line of JSON, and prints tables of the figures.

A line is written as soon as its load has ended. If a run of the benchmark is cut off, the figures of the loads that
have ended are kept.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from bench.loads.drive import BenchError
from bench.measurements.report import OURS, new_table

UNKNOWN = "not known"


@dataclass(frozen=True)
class Row:
    """The figures of one load on one system."""

    device: str
    copy_bytes_per_second: float
    """Bytes per second that a copy on the device reads and writes together, measured immediately before the system was
    started.
    """
    model: str
    load: str
    concurrency: int
    system: str
    start_seconds: float
    output_tokens_per_second: float
    ttft_ms: float
    """Median time to first token in milliseconds. All figures of a row are medians if their names do not say
    otherwise.
    """
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    step_ms: float | None
    """Milliseconds of a step that decodes all sequences of the load. The value is None if most of the load's steps are
    not decode steps.
    """
    limit_ms: float | None
    """Shortest possible time, in milliseconds, of a step that decodes all sequences of the load."""
    idle_percent: float | None
    """Percentage of the load's time in which the device computed no step. The percentage is None if the idle time is
    unknown.
    """
    idle_us: float | None
    """Microseconds per step in which the device computed no step."""


def append_row(file: Path, row: Row) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(asdict(row)) + "\n")


def read_rows(file: Path) -> list[Row]:
    """Read rows from a file of JSON lines. Raises BenchError for an invalid line, but ignores an incomplete last
    line.
    """
    lines = file.read_text().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(Row(**json.loads(line)))
        except (TypeError, ValueError) as error:
            if number < len(lines) or line.endswith("\n"):
                raise BenchError(f"{file}, line {number} is not of bench serve_gpu: {error}") from error
    return rows


def figures_table(rows: Iterable[Row]) -> Table:
    """A table with a line for each load and system, pagewire first. The ratio is pagewire's output rate divided by the
    output rate in the line.
    """
    table = new_table(
        "model", "load", "system", "output tok/s", "ratio", "TTFT, ms", "p99", "ITL, ms", "p99", "idle", "µs a step"
    )
    for model, load, of_load in _by_load(rows):
        ours = next((row for row in of_load if row.system == OURS), None)
        for row in of_load:
            ratio = ours.output_tokens_per_second / row.output_tokens_per_second if ours and row is not ours else None
            table.add_row(
                model, load, row.system, f"{row.output_tokens_per_second:,.0f}", _cell(ratio, "{:.2f}", ""),
                f"{row.ttft_ms:,.0f}", f"{row.ttft_p99_ms:,.0f}", f"{row.itl_p50_ms:.2f}", f"{row.itl_p99_ms:.2f}",
                _cell(row.idle_percent, "{:.1f}%"), _cell(row.idle_us, "{:,.0f}"),
            )  # fmt: skip
    return table


def limits_table(rows: Iterable[Row]) -> Table:
    """A table that compares the time of a decode step, as a client measures it, with the time to copy all bytes that
    the step reads.
    """
    table = new_table("model", "sequences", "system", "copy, GB/s", "limit, ms", "decode step, ms", "x limit")
    for model, _, of_load in _by_load(rows):
        for row in of_load:
            if row.step_ms and row.limit_ms:
                table.add_row(
                    model, str(row.concurrency), row.system, f"{row.copy_bytes_per_second / 1e9:,.0f}",
                    f"{row.limit_ms:.2f}", f"{row.step_ms:.2f}", f"{row.step_ms / row.limit_ms:.2f}",
                )  # fmt: skip
    return table


def _by_load(rows: Iterable[Row]) -> Iterator[tuple[str, str, Sequence[Row]]]:
    """Yield, for each load of each model, the last row of each system, in the order of the loads' first rows."""
    last: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        last.setdefault((row.model, row.load), {})[row.system] = row
    for (model, load), systems in last.items():
        yield model, load, sorted(systems.values(), key=lambda row: row.system != OURS)


def _cell(value: float | None, form: str, otherwise: str = UNKNOWN) -> str:
    return otherwise if value is None else form.format(value)
