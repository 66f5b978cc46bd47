"""Sends loads to pagewire and a peer in turn, and prints their figures: python -m bench serving --peer DIR.

The peer is vLLM's CPU build with the same weights (`bench/systems/peer_vllm.py`), up at the same time; without --peer
it is transformers' `generate`, for loads that a static batch can represent. The last line is JSON. `ratios` are output
tokens per second, pagewire's divided by the peer's.
"""

import argparse
import asyncio
import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import grpc
import psutil
from rich.console import Console

from bench.loads.drive import BenchError, System
from bench.loads.load import CACHE_GIB, CONTEXT, LOADS, Load, capped, choose, replayed
from bench.measurements import chart
from bench.measurements.measure import measure
from bench.measurements.report import Report
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import vllm_on_cpu
from bench.systems.processes import end_on_signals
from pagewire_client import ServerError
from pagewire_common.settings import load_settings
from pagewire_common.start_error import StartError
from scheduler_service.simulation.plot import check
from scheduler_service.simulation.trace import TraceError, read_trace
from worker_service.loading.model_store import find_model
from worker_service.settings import WorkerSettings

TRACE_REQUESTS = 60
TRANSFORMERS_LOADS = ("128x1", "128x8", "128x32")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench serving", description="Compares serving with a peer.")
    parser.add_argument(
        "--peer",
        type=Path,
        metavar="DIR",
        help="a folder with venv/, a virtual environment that can run vLLM, and model/, which both systems serve",
    )
    parser.add_argument("--model", type=Path, help="pagewire's model, such as the peer's weights in a GGUF file")
    parser.add_argument("--flags", default="", metavar='"--FLAG VALUE …"', help="further flags of pagewire's worker")
    parser.add_argument("--loads", metavar="NAME,…", help="loads (default: all)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help=f"the load 'trace' is the first {TRACE_REQUESTS} requests of this file",
    )
    parser.add_argument("--speedup", type=_positive, default=2.0, help="divides the trace's times (default 2)")
    parser.add_argument("--rounds", type=_positive_int, default=2, help="how often each load is run (default 2)")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the output rates, as .png or .svg")
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def run(arguments: argparse.Namespace) -> Report:
    loads = list(LOADS)
    conditions: dict[str, object] = {"context": CONTEXT, "cache_gib": CACHE_GIB, "rounds": arguments.rounds}
    conditions["model"], conditions["flags"] = str(arguments.model or ""), arguments.flags
    if arguments.chart:
        check(arguments.chart)
    if arguments.trace:
        arrivals = read_trace(arguments.trace, limit=TRACE_REQUESTS, speedup=arguments.speedup)
        loads.append(replayed(arrivals, arguments.speedup))
        conditions["trace_requests"] = len(arrivals)
        conditions["trace_requests_cut"] = sum(arrival != capped(arrival) for arrival in arrivals)
    loads = choose(arguments.loads, loads)
    if arguments.peer:
        directory = arguments.peer / "model"
    elif arguments.model:
        raise BenchError("--model is for the weights of --peer in another form, and there is no peer")
    else:
        directory = find_model("default", load_settings(WorkerSettings, "bench", []).cache.expanduser()).path
    vocabulary_size = json.loads((directory / "config.json").read_text())["vocab_size"]

    with ExitStack() as stack:
        systems: list[System] = []
        ours = Pagewire(arguments.model or directory, CACHE_GIB, *shlex.split(arguments.flags))
        systems.append(stack.enter_context(ours))
        peer = None
        if arguments.peer:
            vllm = stack.enter_context(vllm_on_cpu(arguments.peer, CACHE_GIB))
            systems.append(vllm)
            peer = f"{vllm.name} {vllm.version}"
            conditions["peer_environment"] = vllm.environment
        report = Report(peer, conditions, {system.name: system.start_seconds for system in systems})

        async def measure_all() -> None:
            for load in loads:
                report.add(load, await measure(systems, load, vocabulary_size, arguments.rounds))

        asyncio.run(measure_all())
    if not arguments.peer:
        compare_with_transformers(report, [load for load in loads if load.name in TRANSFORMERS_LOADS], directory)
    return report


def compare_with_transformers(report: Report, loads: list[Load], directory: Path) -> None:
    if not loads:
        return
    from bench.systems.peer_transformers import (
        Transformers,  # imported late, because torch's memory and threads would affect the measurements of pagewire
    )

    transformers = Transformers(directory)
    report.peer = transformers.name
    for load in loads:
        report.theirs[load.title] = {"output_tokens_per_second": transformers.output_tokens_per_second(load)}


def main() -> None:
    arguments = parse_arguments()
    end_on_signals()
    try:
        report = run(arguments)
    except (BenchError, ServerError, StartError, TraceError, ValueError, OSError) as error:
        sys.exit(f"bench serving: {error}")
    except (grpc.RpcError, aiohttp.ClientError, psutil.Error) as error:  # pagewire or vLLM failed under load
        sys.exit(f"bench serving: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    console = Console(file=sys.stdout, width=200)
    for table in (report.figures_table(), report.steps_table()):
        console.print(table)
    for sentence in report.sentences():
        console.print(sentence, highlight=False)
    if arguments.chart:
        chart.save(report, arguments.chart)
    sys.stdout.write(json.dumps(report.as_json()) + "\n")


if __name__ == "__main__":
    main()
