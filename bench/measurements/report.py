"""The Markdown tables and the JSON of a benchmark."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from bench.loads.figures import rate
from bench.loads.load import Load
from bench.measurements.measure import Measurement
from bench.measurements.phases import PHASES

OURS = "pagewire"
COLUMNS = {
    "output_tokens_per_second": ("output tok/s", "{:.1f}"),
    "total_tokens_per_second": ("total tok/s", "{:.0f}"),
    "ttft_ms": ("TTFT, ms", "{:.0f}"),
    "ttft_p99_ms": ("p99", "{:.0f}"),
    "tpot_ms": ("TPOT, ms", "{:.1f}"),
    "itl_p99_ms": ("ITL p99, ms", "{:.1f}"),
    "memory_mib": ("memory, MiB", "{:.0f}"),
}
TARGET_LOAD, TARGET_PERCENT = "128/128 x 32", 5


@dataclass
class Report:
    """Each load's figures of pagewire and of the peer, which may have fewer."""

    peer: str | None
    """Name and version."""
    conditions: dict[str, Any]
    start_seconds: dict[str, float]
    measurements: dict[str, Measurement] = field(default_factory=dict)
    ours: dict[str, dict[str, float]] = field(default_factory=dict)
    theirs: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, load: Load, measurement: Measurement) -> None:
        self.measurements[load.title] = measurement
        for name, figures in measurement.figures.items():
            (self.ours if name == OURS else self.theirs)[load.title] = asdict(figures)

    def ratios(self, load: str) -> dict[str, float]:
        """pagewire's figure divided by the peer's, where both have it."""
        theirs = self.theirs.get(load, {})
        return {column: ours / theirs[column] for column, ours in self.ours[load].items() if theirs.get(column)}

    def as_json(self) -> dict[str, Any]:
        ratios = {load: self.ratios(load) for load in self.ours}
        return {
            "peer": self.peer,
            "conditions": self.conditions,
            "start_seconds": self.start_seconds,
            OURS: self.ours,
            "theirs": self.theirs,
            "all_ratios": ratios,
            "rounds": {
                load: {name: [rate([run]) for run in runs] for name, runs in measurement.runs.items()}
                for load, measurement in self.measurements.items()
            },
            "idle_cpu_percent": {load: m.idle_cpu_percent for load, m in self.measurements.items()},
            "steps": {
                load: asdict(split) | {"overhead_percent": split.overhead_percent}
                for load, measurement in self.measurements.items()
                if (split := measurement.split)
            },
            "ratios": {
                load: ratio["output_tokens_per_second"]
                for load, ratio in ratios.items()
                if "output_tokens_per_second" in ratio
            },
        }

    def figures_table(self) -> Table:
        """Three lines for each load: pagewire, the peer, the ratios."""
        table = new_table("load", "system", *(heading for heading, _ in COLUMNS.values()))
        for load, ours in self.ours.items():
            add_row(table, [load, OURS], ours, {column: cell for column, (_, cell) in COLUMNS.items()})
            if load in self.theirs:
                add_row(table, ["", self.peer or ""], self.theirs[load], {c: cell for c, (_, cell) in COLUMNS.items()})
                add_row(table, ["", "ratio"], self.ratios(load), dict.fromkeys(COLUMNS, "{:.2f}"))
        return table

    def steps_table(self) -> Table:
        """Microseconds of each phase of a step, and the percentage of scheduler, codec and gRPC."""
        table = new_table("load", "steps", *PHASES, "scheduler + codec + gRPC")
        for load, measurement in self.measurements.items():
            if split := measurement.split:
                us = (f"{split.us[phase]:,.0f}" for phase in PHASES)
                table.add_row(load, f"{split.num_steps:,}", *us, f"{split.overhead_percent:.1f}%")
        return table

    def sentences(self) -> list[str]:
        """The measured values that no table shows."""
        lines = [f"{name} was ready after {seconds:.1f} s." for name, seconds in self.start_seconds.items()]
        measurement = self.measurements.get(TARGET_LOAD)
        if measurement and (split := measurement.split):
            lines.append(
                f"Under {TARGET_LOAD}, {split.overhead_percent:.1f}% of a step are scheduler, codec and gRPC "
                f"(target: at most {TARGET_PERCENT}%)."
            )
        if "trace_requests" in self.conditions:
            lines.append(
                "Of the trace's {trace_requests} requests, {trace_requests_cut} were cut to {context} tokens: "
                "outputs to half of that, prompts to what the output leaves.".format(**self.conditions)
            )
        idle = [percent for m in self.measurements.values() for percent in m.idle_cpu_percent.values()]
        if idle:
            lines.append(f"Whichever system was not under load took at most {max(idle):.1f}% of a core.")
        return lines


def new_table(*headings: str) -> Table:
    table = Table(box=MARKDOWN)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("load", "system") else "right", no_wrap=True)
    return table


def add_row(table: Table, first: Sequence[str], figures: Mapping[str, float], cells: Mapping[str, str]) -> None:
    table.add_row(*first, *(cells[column].format(figures[column]) if column in figures else "" for column in COLUMNS))
