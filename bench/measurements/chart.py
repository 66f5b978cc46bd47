"""Draws output tokens per second for each load, pagewire next to the peer, with their ratio above the bars."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from bench.measurements.report import OURS, Report

COLOURS = ("#0072b2", "#d55e00")  # two colours that colour-blind readers can distinguish (Okabe and Ito)
BAR = 0.38


def save(report: Report, path: Path) -> None:
    draw(report).savefig(path)


def draw(report: Report) -> Figure:
    figure = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"Output tokens a second: {OURS}" + (f" and {report.peer}" if report.peer else ""), loc="left")
    loads = list(report.ours)
    ours, theirs = _rates(report.ours, loads), _rates(report.theirs, loads)
    for shift, rates, name, colour in ((-0.5, ours, OURS, COLOURS[0]), (0.5, theirs, report.peer, COLOURS[1])):
        if any(rates):
            axes.bar([place + shift * BAR for place in range(len(loads))], rates, BAR, label=name, color=colour)
    for place, load in enumerate(loads):
        if ratio := report.ratios(load).get("output_tokens_per_second"):
            top = max(ours[place], theirs[place])
            axes.annotate(f"{ratio:.2f} x", (place, top), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(loads)), loads)
    axes.set_xlabel("prompt/output tokens x concurrency")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    return figure


def _rates(figures: Mapping[str, Mapping[str, float]], loads: list[str]) -> list[float]:
    return [figures.get(load, {}).get("output_tokens_per_second", 0.0) for load in loads]
