"""Draws simulated runs, by policy. Only this file needs matplotlib; no display is needed."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter, StrMethodFormatter

from scheduler_service.simulation.simulator import RequestTimes, Result
from scheduler_service.simulation.summary import by_priority, by_tenant, ttft

MAX_TENANTS = 10


class Style(NamedTuple):
    colour: str
    dashes: str | tuple[int, tuple[float, float]]
    marker: str
    size: int


# Colours of Okabe and Ito, for colour-blind readers. Dashes and smaller points keep curves visible below others.
STYLES = (
    Style("#0072b2", "-", "o", 10),
    Style("#d55e00", (0, (5, 2)), "s", 6),
    Style("#009e73", (0, (1.5, 1.5)), "D", 4),
)


def check(path: Path) -> None:
    """Raise ValueError if `save` could not write such a file."""
    if path.suffix[1:].lower() not in (known := Figure().canvas.get_supported_filetypes()):
        raise ValueError(f"{path} is no name for a figure; it must end in one of {', '.join(sorted(known))}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")


def save(results: Mapping[str, Result], title: str, path: Path) -> None:
    draw(results, title).savefig(path)


def draw(results: Mapping[str, Result], title: str) -> Figure:
    figure = Figure(figsize=(12, 6), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize="x-large")
    grid = figure.add_gridspec(1, 2, width_ratios=(1, 1.2))
    styled = [(policy, result, style) for (policy, result), style in zip(results.items(), STYLES, strict=False)]
    num_kinds = len(_kinds(styled[0][1].requests))
    if num_kinds > 1:
        rows = grid[0].subgridspec(2, 1, height_ratios=(10, 2 + num_kinds))
        latency = figure.add_subplot(rows[0])
        tails = figure.add_subplot(rows[1], sharex=latency)
        latency.tick_params(labelbottom=False)
        _draw_tails(tails, styled)
        tails.set_xlabel("seconds")
    else:
        latency = figure.add_subplot(grid[0])
        latency.set_xlabel("seconds")
    _draw_latency(latency, styled)
    halves = grid[1].subgridspec(2, 1)
    waiting = figure.add_subplot(halves[0])
    running = figure.add_subplot(halves[1], sharex=waiting)
    _draw_counts(waiting, "Waiting for admission", styled, "arrived", "admitted")
    _draw_counts(running, "Admitted and not finished", styled, "admitted", "finished")
    waiting.tick_params(labelbottom=False)
    running.set_xlabel("virtual seconds")
    return figure


def _kinds(requests: Sequence[RequestTimes]) -> dict[str, Sequence[RequestTimes]]:
    """All requests, and those of each tenant and each priority, if there are several."""
    tenants, priorities = by_tenant(requests), by_priority(requests)
    busiest = sorted(tenants, key=lambda tenant: -len(tenants[tenant]))[:MAX_TENANTS]
    kinds: dict[str, Sequence[RequestTimes]] = {"all": requests}
    if len(tenants) > 1:
        kinds |= {f"tenant {tenant}": tenants[tenant] for tenant in busiest}
    if len(priorities) > 1:
        kinds |= {f"priority {priority}": some for priority, some in priorities.items()}
    return kinds


def _draw_latency(axes: Axes, styled: Sequence[tuple[str, Result, Style]]) -> None:
    _frame(axes, "Time to first token")
    for policy, result, style in styled:
        seconds = sorted(request.ttft for request in result.requests)
        shares = [(number + 1) / len(seconds) for number in range(len(seconds))]
        label = f"{policy}, p99 {ttft(result.requests)['p99']:,.3g} s"
        axes.step(seconds, shares, where="post", color=style.colour, linestyle=style.dashes, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:,g}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(0, 1.01)
    axes.set_ylabel("requests that had it by then")
    axes.legend(loc="upper left", frameon=False)


def _draw_tails(axes: Axes, styled: Sequence[tuple[str, Result, Style]]) -> None:
    _frame(axes, "Its p99 by tenant and priority")
    for policy, result, style in styled:
        kinds = _kinds(result.requests)
        tails = [ttft(requests)["p99"] for requests in kinds.values()]
        axes.plot(tails, list(kinds), style.marker, color=style.colour, markersize=style.size, label=policy)
    axes.invert_yaxis()


def _draw_counts(axes: Axes, title: str, styled: Sequence[tuple[str, Result, Style]], begin: str, end: str) -> None:
    _frame(axes, title)
    for policy, result, style in styled:
        times, counts = count(*([getattr(r, name) for r in result.requests] for name in (begin, end)))
        axes.step(times, counts, where="post", color=style.colour, linestyle=style.dashes, linewidth=1, label=policy)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_ylabel("requests")


def count(begins: Iterable[float], ends: Iterable[float]) -> tuple[list[float], list[int]]:
    """Times of a change in the number of open spans, and the number after each."""
    changes: dict[float, int] = {0.0: 0}
    for times, change in ((begins, 1), (ends, -1)):
        for time in times:
            changes[time] = changes.get(time, 0) + change
    moments = sorted(changes)
    return moments, list(accumulate(changes[moment] for moment in moments))


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
