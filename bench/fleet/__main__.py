"""Measures fleets of several workers, their overhead and their behaviour under failures and load: python -m
bench.fleet.

The benchmark prints Markdown tables, and JSON as its last line. Its parts measure the following:

- `failover`: the time from killing a worker with SIGKILL to the next token of the worker's streams, and how much of
  this time is spent on computing lost tokens again.
- `feeding`: the number of workers that one scheduler process keeps busy. Each simulated worker runs 256 sequences and
  takes 20 ms for a step.
- `front-ends`: the front ends' CPU time per token with few and with many streams, over one connection and over many.
  This part also measures the message with which the engine sends a step's tokens to a front end.
- `overhead`: the output rate of one scheduler with one to three workers, compared with one scheduler for each worker.
- `tracing`: the scheduler's CPU time per token if every request is traced with spans, and without spans.
- `bystanders`: the output rate of some streams while other clients never read their answers, or hold connections open
  without sending.
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import psutil
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from bench.fleet import bystanders, failover, feeding, front_ends, overhead, tracing
from bench.loads.drive import BenchError
from pagewire_client import ServerError
from pagewire_common.serving.open_files import raise_open_files_limit
from pagewire_common.settings import load_settings
from pagewire_common.start_error import StartError
from worker_service.loading.model_store import find_model
from worker_service.settings import WorkerSettings

PARTS = ("failover", "feeding", "front-ends", "overhead", "tracing", "bystanders")
OVERHEAD_WORKERS = (1, 2, 3)
"""Numbers of workers with which the overhead is measured. With one worker, the two compared systems are equal, so the
difference of their figures is the error of the measurement.
"""
OVERHEAD_COLUMNS = (
    "workers", "apart, tok/s", "together, tok/s", "overhead, %", "at least", "at most", "scheduler apart, µs a token",
    "together, µs a token",
)  # fmt: skip
FEEDING_COLUMNS = (
    "workers", "idle, %", "sequences a step", "tok/s", "messages/s", "tokens a message",
    "engine, µs a token", "front ends, µs a token", "engine, cores", "front ends, cores", "busiest of them, %",
    "workers, cores", "client, cores",
)  # fmt: skip
FRONT_ENDS_COLUMNS = (
    "streams", "front ends", "connections", "messages/s", "engine, µs a token", "front ends, µs a token",
    "front ends, cores", "busiest of them, %",
)  # fmt: skip


def tell(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def table(*columns: str, rows: list[tuple[object, ...]]) -> Table:
    result = Table(*columns, box=MARKDOWN)
    for row in rows:
        result.add_row(*(f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    return result


def run(parts: list[str], most: int, model: Path, console: Console) -> dict[str, Any]:
    vocabulary_size = json.loads((model / "config.json").read_text())["vocab_size"]
    report: dict[str, Any] = {}
    rows: list[tuple[object, ...]]
    if "failover" in parts:
        failed = failover.run(model, vocabulary_size, tell)
        report["failover"] = failed.as_json()
        rows = [
            ("kill to next token", *(report["failover"][f"kill_to_next_token_ms_{of}"] for of in ("median", "worst"))),
            ("recompute", *(report["failover"][f"recompute_ms_{of}"] for of in ("median", "worst"))),
        ]
        console.print(table("ms", "median", "worst", rows=rows))
    if "feeding" in parts:
        seen = feeding.search(model, most, lambda feeding: tell(str(feeding)))
        report["feeding"] = {
            "workers_fed": max(point.num_workers for point in seen if point.is_fed),
            "points": [asdict(point) for point in seen],
        }
        console.print(table(*FEEDING_COLUMNS, rows=[tuple(asdict(point).values()) for point in seen]))
    if "front-ends" in parts:
        costs, wire = front_ends.run(model, tell), front_ends.wire()
        report["front-ends"] = {"costs": [asdict(cost) for cost in costs], "wire": asdict(wire)}
        console.print(table(*FRONT_ENDS_COLUMNS, rows=[tuple(asdict(cost).values()) for cost in costs]))
        console.print(table("bytes a step", "encode, µs", "decode, µs", rows=[tuple(asdict(wire).values())]))
    if "overhead" in parts:
        report["overhead"] = [asdict(overhead.run(model, vocabulary_size, number, tell)) for number in OVERHEAD_WORKERS]
        console.print(table(*OVERHEAD_COLUMNS, rows=[tuple(one.values()) for one in report["overhead"]]))
    if "tracing" in parts:
        report["tracing"] = asdict(tracing.run(model, tell))
        columns = ("without spans, µs a token", "with spans", "with to without", "without to without")
        console.print(table(*columns, rows=[tuple(f"{figure:.3g}" for figure in report["tracing"].values())]))
    if "bystanders" in parts:
        report["bystanders"] = asdict(bystanders.run(model, vocabulary_size, tell))
        rows = [tuple(report["bystanders"].values())]
        console.print(table("alone, tok/s", "beside, tok/s", "slowed, %", "at least", "at most", rows=rows))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench fleet", description="Measures what a fleet bears and costs.")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--most", type=int, default=32, help="most workers to feed (default 32)")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}, but {', '.join(PARTS)}")
    raise_open_files_limit()  # The part `bystanders` opens a thousand connections from this process.
    # On SIGTERM and SIGHUP, as on Ctrl-C, the benchmark ends and stops its child processes.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        model = find_model("default", load_settings(WorkerSettings, "bench", []).cache.expanduser()).path
        report = run(parts, arguments.most, model, Console(file=sys.stdout, width=240))
    except (BenchError, ServerError, StartError, OSError) as error:
        sys.exit(f"bench fleet: {error}")
    except (grpc.RpcError, psutil.Error) as error:
        sys.exit(f"bench fleet: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
