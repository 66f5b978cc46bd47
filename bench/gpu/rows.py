"""Writes the figures of each load on each system as a line of JSON, and prints tables of the figures.

A line is written when its load has ended. If a run is cut off, the figures of its earlier loads are kept.
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
    """Bytes per second that a copy reads and writes, measured immediately before the system was started."""
    model: str
    load: str
    concurrency: int
    system: str
    start_seconds: float
    output_tokens_per_second: float
    ttft_ms: float
    """Median time to first token in milliseconds. Figures without another name are medians."""
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    step_ms: float | None
    """Milliseconds of a decode step of all sequences. The value is None if most steps are not decode steps."""
    limit_ms: float | None
    """Shortest possible time of a decode step of all sequences, in milliseconds."""
    idle_percent: float | None
    """Percentage of the load's time in which the device computed no step. The value is None if the idle time is
    unknown.
    """
    idle_us: float | None
    """Idle microseconds of the device per step."""


def append_row(file: Path, row: Row) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(asdict(row)) + "\n")


def read_rows(file: Path) -> list[Row]:
    """Read rows from a file. Raises BenchError for an invalid line, but ignores an incomplete last line."""
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
    """A table with a line for each load and system, our system first. The ratio is our rate divided by the
    line's rate.
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
    """The time of a decode step, as a client measures it, next to the time of a copy of all bytes that the step
    reads.
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
    """Yield the last row of each system, for each load of each model. The order of loads is the order of their first
    rows.
    """
    last: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        last.setdefault((row.model, row.load), {})[row.system] = row
    for (model, load), systems in last.items():
        yield model, load, sorted(systems.values(), key=lambda row: row.system != OURS)


def _cell(value: float | None, form: str, otherwise: str = UNKNOWN) -> str:
    return otherwise if value is None else form.format(value)
