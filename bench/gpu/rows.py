"""Writes each load's figures on each system as a line of JSON, and prints tables.

Each line is written when its load has ended, so that a run that is cut off keeps its figures.
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
    device: str
    copy_bytes_per_second: float
    """Bytes that a copy on the device reads and writes, measured just before the system was started."""
    model: str
    load: str
    concurrency: int
    system: str
    start_seconds: float
    output_tokens_per_second: float
    ttft_ms: float
    """Median. All figures are medians if their names do not say otherwise."""
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    step_ms: float | None
    """Milliseconds of a step that decodes all sequences; None if most of the load's steps do not."""
    limit_ms: float | None
    """Shortest possible `step_ms`."""
    idle_percent: float | None
    """Time in which the device computed no step; None if unknown."""
    idle_us: float | None
    """The same per step."""


def append_row(file: Path, row: Row) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(asdict(row)) + "\n")


def read_rows(file: Path) -> list[Row]:
    """Rows of a file of JSON lines, without an incomplete last line. Raises BenchError for an invalid line."""
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
    """A line for each load and system, pagewire first. The ratio is pagewire's output rate divided by the line's."""
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
    """The time of a decode step at the client, compared with the time to copy all bytes that it reads."""
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
    """For each load of each model, the last row of each system, in the order of first rows."""
    last: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        last.setdefault((row.model, row.load), {})[row.system] = row
    for (model, load), systems in last.items():
        yield model, load, sorted(systems.values(), key=lambda row: row.system != OURS)


def _cell(value: float | None, form: str, otherwise: str = UNKNOWN) -> str:
    return otherwise if value is None else form.format(value)
