"""Measures fleets of several workers: python -m bench.fleet. Prints Markdown tables, and JSON as the last line.

- `failover`: the time from SIGKILL of a worker to the next token of its streams, and to compute lost tokens again.
- `feeding`: the number of workers that one scheduler process keeps busy (256 sequences, steps of 20 ms).
- `front-ends`: the front ends' CPU time per token, and the engine's message to a front end.
- `overhead`: the output rate of one scheduler with one to three workers, compared with one scheduler for each worker.
- `tracing`: the scheduler's CPU time per token with and without spans.
- `bystanders`: the output rate while other clients never read their answers, or hold connections open.
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
"""Numbers of workers. With one, both compared systems are equal, so their difference is the error of the measurement.
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
    parser = argparse.ArgumentParser(prog="bench fleet", description="Measures fleets of several workers.")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,…", help=f"names, of {', '.join(PARTS)}")
    parser.add_argument("--most", type=int, default=32, help="most workers of the part feeding (default 32)")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}, but {', '.join(PARTS)}")
    raise_open_files_limit()  # The part `bystanders` opens a thousand connections from this process.
    # SIGTERM and SIGHUP end the benchmark and its child processes, as Ctrl-C does.
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
