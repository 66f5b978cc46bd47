"""Compares serving on a GPU with vLLM: the same models, loads and GPU, one after the other in one run.

python -m bench serve_gpu --peer DIR [--models llama-8b,…] [--loads 128x1,…] [--rounds 1] [--output FILE]
python -m bench serve_gpu --show FILE        prints the tables of one or several runs' output files

A client on this machine calls pagewire's services over gRPC and vLLM's server over HTTP. Both have bf16 models of real
shapes with random weights, 90 % of the GPU's memory, prefix caching, and steps of at most 256 sequences and 8,192
tokens; otherwise their defaults. Only one is up at a time, because two largest models do not fit. The GPU's copy
bandwidth is measured before each start, and shows whether it has become slower.

DIR is where `python -m bench.gpu.pack join` unpacked vLLM, or a folder with a virtual environment venv/. Without DIR,
only pagewire is measured. The time of a decode step is the median, over groups of 16 tokens of a request, of the mean
time between two tokens; its limit is the time to copy all bytes that it reads. CUDA events in pagewire's worker measure
when the GPU is idle. With --device cpu and vLLM's CPU build, no GPU is needed. The last line is JSON.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from statistics import median

import aiohttp
import grpc
import psutil
from rich.console import Console

from bench.gpu.memory import measure_copy
from bench.gpu.rows import Row, append_row, figures_table, limits_table, read_rows
from bench.gpu.shapes import SHAPES, step_bytes, write_model
from bench.loads.drive import BenchError
from bench.loads.load import Load, choose, shared_prefix, streams
from bench.measurements.measure import Measurement, measure
from bench.measurements.report import OURS
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import Vllm, cpu_build
from bench.systems.processes import end_on_signals
from pagewire_client import ServerError

CONTEXT = 8448
"""Tokens of a sequence: 8,192 of the prompt and 256 of the output."""
MODELS = ("llama-1b", "qwen3-4b", "llama-8b", "qwen3-30b-a3b")
LOADS = (
    streams(128, 128, 1, num_requests=4),
    streams(128, 128, 32, num_requests=64),
    streams(128, 128, 256, num_requests=512),
    shared_prefix(4096, 128, 128, num_requests=64),
    streams(1024, 128, 1, num_requests=4),
    streams(1024, 128, 32, num_requests=64),
    streams(1024, 128, 256, num_requests=256),
    streams(8192, 256, 1, num_requests=2),
    streams(8192, 256, 32, num_requests=32),
    streams(8192, 256, 256, num_requests=256),
)
"""The shortest load is first, so that a time limit cuts off only the longest."""
CPU_CACHE_GIB = 2
STEP_TOKENS = 16
MAX = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192")

Start = Callable[[], AbstractContextManager[Pagewire | Vllm]]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench serve_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, metavar="DIR", help="the folder of vLLM")
    parser.add_argument("--models", default=",".join(MODELS), help=f"names, of {', '.join(SHAPES)}")
    parser.add_argument("--loads", metavar="NAME,…", help=f"names, of {', '.join(load.name for load in LOADS)}")
    parser.add_argument("--rounds", type=int, default=1, help="how often each load is run (default 1)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append each load's figures to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, and print this file's tables")
    return parser.parse_args(arguments)


def systems(model: Path, device: str, peer: Path | None) -> Iterator[Start]:
    """A function that starts each system, pagewire first."""
    ours = [*MAX, "--device", device, "--load-format", "dummy"]
    cache_gib = CPU_CACHE_GIB if device == "cpu" else None
    yield lambda: Pagewire(model, cache_gib, *ours, context=CONTEXT, scheduler_flags=MAX)
    if peer:
        program, environment = vllm_in(peer)
        theirs = [*MAX, "--load-format", "dummy"]
        yield lambda: Vllm(program, model, *theirs, context=CONTEXT, environment=environment)


def vllm_in(folder: Path) -> tuple[Sequence[str | Path], dict[str, str]]:
    """vLLM's command and environment, from a virtual environment or unpacked packages.

    Raises BenchError for a folder with neither.
    """
    if (folder / "venv").is_dir():
        return cpu_build(folder, CPU_CACHE_GIB)
    if (folder / "vllm" / "vllm").is_dir():
        # FlashInfer is not packed. By default vLLM uses its sampler on Hopper, although greedy requests do not need it.
        environment = {"PYTHONPATH": str((folder / "vllm").absolute()), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"], environment
    raise BenchError(f"{folder} has neither venv/ nor vllm/vllm/, which `python -m bench.gpu.pack join` unpacks there")


def run(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Measure all loads into `rows` and the output file. Raises BenchError if a system fails."""
    loads = choose(arguments.loads, LOADS)
    models = arguments.models.split(",")
    if unknown := [model for model in models if model not in SHAPES]:
        raise ValueError(f"there is no model {unknown[0]!r} here, but {', '.join(SHAPES)}")
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / model
            write_model(SHAPES[model], path)
            for start in systems(path, arguments.device, arguments.peer):
                device, bandwidth = measure_copy(arguments.device)
                with start() as system:
                    for load in loads:
                        found = asyncio.run(measure([system], load, SHAPES[model]["vocab_size"], arguments.rounds))
                        rows.append(row_of(model, load, system, found, device, bandwidth))
                        if arguments.output:
                            append_row(arguments.output, rows[-1])


def row_of(model: str, load: Load, system: Pagewire | Vllm, found: Measurement, device: str, bandwidth: float) -> Row:
    figures = found.figures[system.name]
    arrival = load.arrivals[0]
    runs = found.runs[system.name]
    step_ms = limit_ms = idle_percent = idle_us = None
    if arrival.output_tokens >= arrival.prompt_tokens:
        timelines = (timeline for run in runs for timeline in run.timelines)
        step_ms = 1e3 * median(pause for timeline in timelines for pause in timeline.mean_pauses(STEP_TOKENS))
        context = arrival.prompt_tokens + arrival.output_tokens / 2
        limit_ms = 1e3 * step_bytes(SHAPES[model], load.concurrency, context) / bandwidth
    if split := found.split:
        seconds = sum(run.seconds for run in runs)
        idle_us = split.idle_us(seconds)
        idle_percent = 1e-4 * idle_us * split.num_steps / seconds
    return Row(
        device=device,
        copy_bytes_per_second=bandwidth,
        model=model,
        load=load.title,
        concurrency=load.concurrency,
        system=f"{system.name} {system.version}" if isinstance(system, Vllm) else OURS,
        start_seconds=system.start_seconds,
        output_tokens_per_second=figures.output_tokens_per_second,
        ttft_ms=figures.ttft_ms,
        ttft_p99_ms=figures.ttft_p99_ms,
        itl_p50_ms=figures.itl_p50_ms,
        itl_p99_ms=figures.itl_p99_ms,
        step_ms=step_ms,
        limit_ms=limit_ms,
        idle_percent=idle_percent,
        idle_us=idle_us,
    )


def show(rows: Sequence[Row]) -> None:
    console = Console(file=sys.stdout, width=200)
    for device in dict.fromkeys(row.device for row in rows):
        console.print(device, highlight=False)
        of_device = [row for row in rows if row.device == device]
        console.print(figures_table(of_device))
        console.print(limits_table(of_device))
    sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")


def main() -> None:
    arguments = parse_arguments()
    end_on_signals()
    rows: list[Row] = []
    try:
        if arguments.show:
            rows += read_rows(arguments.show)
        else:
            run(arguments, rows)
    except (BenchError, ServerError, ValueError, OSError) as error:
        sys.exit(f"bench serve_gpu: {error}")
    except (grpc.RpcError, aiohttp.ClientError, psutil.Error) as error:  # pagewire or vLLM failed under load
        sys.exit(f"bench serve_gpu: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if rows:
            show(rows)


if __name__ == "__main__":
    main()
