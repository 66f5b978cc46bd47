"""Draws the pictures of docs/how from the recordings in docs/pictures: python -m bench.pictures.draw [FOLDER].

A picture is a function of its recording: the files are the same, byte for byte, on every run with the pinned
matplotlib.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.pictures.history import History, Slice
from bench.pictures.record import FOLDER

# Okabe and Ito's colours, which colour-blind readers can distinguish, and greys.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LIGHT = ("#56b4e9", "#f4b183")
"""Lighter shades of the first two, for prefill."""
CACHED, SHARED = "#d9d9d9", "#000000"
STATES = {"queued": "#d9d9d9", "prefill": "#56b4e9", "decode": "#0072b2", "preempted": "#cc79a7", "swapped": "#e69f00"}
STYLE: Any = {"svg.hashsalt": "pagewire", "svg.fonttype": "none", "font.size": 9, "font.family": "DejaVu Sans"}


def draw_blocks(recording: Callable[[str], History]) -> Figure:
    """Each device block over the steps, in the colour of the request that holds it."""
    history = recording("blocks")
    figure, axes = _figure(8, 3.6)
    requests = list(history.prompts)
    for block in range(history.num_blocks):
        owners: list[str] = []
        for step in history.steps:
            holders = [output.request_id for output, table in step.tables.items() if block in table]
            owners.append(
                "shared" if len(holders) > 1 else holders[0] if holders else "cached" if block in step.cached else ""
            )
        for owner, first, length in _runs(owners):
            if owner:
                colour = {"cached": CACHED, "shared": SHARED}.get(owner) or COLOURS[requests.index(owner)]
                axes.broken_barh([(first, length)], (block - 0.45, 0.9), color=colour, linewidth=0)
    axes.set(xlabel="step", ylabel="block", xlim=(0, len(history.steps)), ylim=(-0.6, history.num_blocks - 0.4))
    _legend(axes, {**dict(zip(requests, COLOURS, strict=False)), "shared": SHARED, "free, cached": CACHED})
    return figure


def draw_chunked_prefill(recording: Callable[[str], History]) -> Figure:
    """Tokens of each step: decodes, and the chunks of prompts that fill the rest of the budget."""
    history = recording("chunked_prefill")
    figure, axes = _figure(8, 3)
    steps = history.steps[: _last_prefill(history) + 12]
    kinds: list[tuple[str, list[int], str]] = [
        ("decode", [sum(c.num_tokens for c in step.chunks if not c.is_prefill) for step in steps], COLOURS[0]),
    ]
    prompts = dict.fromkeys(c.request_id for step in steps for c in step.chunks if c.is_prefill)
    long = max(prompts, key=lambda name: history.prompts[name][0])
    for label, names, colour in (("short prompts", prompts.keys() - {long}, COLOURS[5]), (long, {long}, COLOURS[1])):
        kinds.append(
            (
                label,
                [sum(c.num_tokens for c in step.chunks if c.is_prefill and c.request_id in names) for step in steps],
                colour,
            )
        )
    bottom = [0] * len(steps)
    for label, counts, colour in kinds:
        axes.bar(range(len(steps)), counts, 0.9, bottom, label=label, color=colour)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    axes.axhline(max(bottom), color="#000000", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="tokens", xlim=(-0.6, len(steps) - 0.4))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def draw_copy_on_write(recording: Callable[[str], History]) -> Figure:
    """The block tables of a request's outputs: shared blocks dark, own blocks light."""
    history = recording("copy_on_write")
    num_outputs = max(len(step.tables) for step in history.steps)
    parallel = [step for step in history.steps if len(step.tables) == num_outputs]
    moments = [("first step with all outputs", parallel[0]), ("last step", parallel[-1])]
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    for axes, (title, step) in zip(figure.subplots(1, 2, sharey=True), moments, strict=True):
        held = [block for table in step.tables.values() for block in table]
        for row, (_, table) in enumerate(sorted(step.tables.items())):
            for column, block in enumerate(table):
                is_shared = held.count(block) > 1
                colour = COLOURS[0] if is_shared else COLOURS[5]
                axes.broken_barh([(column + 0.03, 0.94)], (row - 0.45, 0.9), color=colour, linewidth=0)
                axes.text(column + 0.5, row, str(block), ha="center", va="center", color="w" if is_shared else "k")
        axes.set_title(title, loc="left")
        axes.set(
            xlabel="entry of the block table",
            yticks=range(len(step.tables)),
            xlim=(0, max(map(len, moments[-1][1].tables.values()))),
        )
        axes.set_yticklabels([f"output {output.number + 1}" for output in sorted(step.tables)])
        axes.set_ylim(len(step.tables) - 0.4, -0.6)
        _frame(axes)
    _legend(axes, {"shared": COLOURS[0], "own": COLOURS[5]})
    return figure


def draw_preemption(recording: Callable[[str], History]) -> Figure:
    """The states of requests that do not fit the pool together, with recompute and with swap."""
    histories = {"recompute": recording("preemption"), "swap": recording("swap")}
    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, (mode, history) in zip(figure.subplots(2, 1, sharex=True), histories.items(), strict=True):
        _lanes(axes, history, lambda one: STATES[one.state])
        axes.set_title(f"--preemption-mode {mode}", loc="left")
    axes.set_xlabel("seconds")
    _legend(axes, STATES)
    return figure


def draw_prefix_cache(recording: Callable[[str], History]) -> Figure:
    """The prompt tokens of each request: found in the prefix cache, and computed."""
    prompts = recording("prefix_cache").prompts
    figure, axes = _figure(8, 2)
    names = list(prompts)
    cached = [prompts[name][1] for name in names]
    axes.barh(names, cached, color=CACHED, label="found in the cache")
    axes.barh(names, [prompts[n][0] - prompts[n][1] for n in names], left=cached, color=COLOURS[0], label="computed")
    axes.invert_yaxis()
    axes.set_xlabel("tokens of the prompt")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def draw_placement(recording: Callable[[str], History]) -> Figure:
    """Each request in the colour of its worker, with the reason of the choice."""
    history = recording("placement")
    figure, axes = _figure(8, 3.2)
    _lanes(axes, history, lambda one: _worker_colour(history, one))
    ends = {one.request_id: one.end for one in history.slices}
    rows = {name: row for row, name in enumerate(history.prompts)}
    for choice in history.choices:
        name = choice.request_id
        axes.annotate(
            f"{choice.reason}, {choice.cached_tokens} cached",
            (ends[name], rows[name]), (4, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    axes.set_xlim(0, max(ends.values()) * 1.25)
    axes.set_xlabel("seconds")
    _legend_of_workers(axes, history)
    return figure


def draw_failover(recording: Callable[[str], History]) -> Figure:
    """Requests over time in the colour of their worker; the line is the loss of a worker."""
    history = recording("failover")
    figure, axes = _figure(8, 2.4)
    _lanes(axes, history, lambda one: _worker_colour(history, one))
    for at in history.losses:
        axes.axvline(at, color="#000000", linestyle="--", linewidth=1)
    axes.set_xlabel("seconds")
    _legend_of_workers(axes, history)
    return figure


def draw_speculation(recording: Callable[[str], History]) -> Figure:
    """Draft tokens of each step, and the accepted ones among them."""
    history = recording("speculation")
    steps = [step for step in history.steps if step.num_gained]
    figure, axes = _figure(8, 2.6)
    axes.bar(range(len(steps)), [step.num_drafts for step in steps], 0.9, color=CACHED, label="drafted")
    axes.bar(range(len(steps)), [max(0, s.num_gained - 1) for s in steps], 0.6, color=COLOURS[0], label="accepted")
    axes.set(xlabel="step that gained tokens", ylabel="draft tokens")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


PICTURES: dict[str, Callable[[Callable[[str], History]], Figure]] = {
    "blocks": draw_blocks,
    "chunked-prefill": draw_chunked_prefill,
    "copy-on-write": draw_copy_on_write,
    "preemption": draw_preemption,
    "prefix-cache": draw_prefix_cache,
    "placement": draw_placement,
    "failover": draw_failover,
    "speculation": draw_speculation,
}


# ---- parts of pictures


def _lanes(axes: Axes, history: History, colour: Callable[[Slice], str]) -> None:
    """A bar for each state of each request, in the order of arrival from the top."""
    rows = {name: row for row, name in enumerate(history.prompts)}
    for one in history.slices:
        axes.broken_barh(
            [(one.begin, one.end - one.begin)], (rows[one.request_id] - 0.4, 0.8), color=colour(one), linewidth=0
        )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    _frame(axes)


def _worker_colour(history: History, one: Slice) -> str:
    colours = LIGHT if one.state == "prefill" else COLOURS
    return colours[history.workers.index(one.worker)] if one.worker else STATES[one.state]


def _legend_of_workers(axes: Axes, history: History) -> None:
    rows = {f"worker {number + 1}{text}": colours[number] for number in range(len(history.workers))
            for text, colours in ((", prefill", LIGHT), (", decode", COLOURS))}  # fmt: skip
    states = dict.fromkeys(one.state for one in history.slices if not one.worker)
    _legend(axes, {**rows, **{state: STATES[state] for state in states}})


def _last_prefill(history: History) -> int:
    return max(index for index, step in enumerate(history.steps) if any(chunk.is_prefill for chunk in step.chunks))


def _runs(owners: Iterable[str]) -> list[tuple[str, int, int]]:
    """Runs of equal owners: owner, first index and length."""
    runs, first = [], 0
    for owner, same in groupby(owners):
        length = len(list(same))
        runs.append((owner, first, length))
        first += length
    return runs


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _frame(axes)
    return figure, axes


def _frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes, colours: dict[str, str]) -> None:
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


# ---- files


def read(name: str) -> History:
    return History.read(FOLDER / f"{name}.rec")


def save(name: str, folder: Path, recording: Callable[[str], History] = read) -> Path:
    """Draw one picture. Returns the file, which any run writes with the same bytes."""
    path = folder / f"{name}.svg"
    with mpl.rc_context(STYLE):
        PICTURES[name](recording).savefig(path, metadata={"Date": None, "Creator": None})
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pictures.draw", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="the default is docs/pictures")
    folder = parser.parse_args(arguments).folder
    for name in PICTURES:
        save(name, folder)


if __name__ == "__main__":
    main()
