"""Compares serving on a GPU with vLLM: both systems have the same models, loads and GPU, one after the other, in one
run.

    python -m bench serve_gpu --peer DIR [--models llama-8b,…] [--loads 128x1,…] [--rounds 1] [--output FILE]
    python -m bench serve_gpu --show FILE        prints the tables of one or several runs' output files

pagewire's scheduler and worker serve a client over gRPC on this machine. The same client program sends requests to
vLLM's server over HTTP. Both systems have bf16 models with real shapes and random weights, 90 % of the GPU's memory,
and prefix caching. A step has at most 256 sequences and 8,192 tokens. All other settings of both systems have their
defaults. Only one system is up at a time, because the GPU's memory cannot hold the largest model twice together with
keys and values. Before each start of a system, the GPU's copy bandwidth is measured, which shows whether the GPU has
become slower.

DIR is the folder into which `python -m bench.gpu.pack join` unpacked vLLM. DIR may also be a folder with venv/, a
virtual environment that can run vLLM. Without DIR, only pagewire is measured. The client measures the time of a decode
step: it is the median, over groups of 16 tokens of a request, of the mean time between two tokens. The limit of a
decode step is the time to copy all bytes that the step reads. CUDA events in pagewire's worker measure when the GPU is
idle. For vLLM the idle time is unknown. With --device cpu and vLLM's CPU build in DIR/venv, the program runs without a
GPU. The last line of the output is JSON.
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
"""Maximum number of tokens of a sequence: 8,192 prompt tokens and 256 output tokens."""
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
"""The measured loads. The shortest load is first, so that a time limit on the program cuts off only the longest
loads.
"""
CPU_CACHE_GIB = 2
STEP_TOKENS = 16
MAX = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192")

Start = Callable[[], AbstractContextManager[Pagewire | Vllm]]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench serve_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, metavar="DIR", help="where vLLM is")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--loads", metavar="NAME,…", help=f"of {', '.join(load.name for load in LOADS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each load is run (default 1)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append each load's figures to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, show this file")
    return parser.parse_args(arguments)


def systems(model: Path, device: str, peer: Path | None) -> Iterator[Start]:
    """For each system, yield a function that starts the system. pagewire is first."""
    ours = [*MAX, "--device", device, "--load-format", "dummy"]
    cache_gib = CPU_CACHE_GIB if device == "cpu" else None
    yield lambda: Pagewire(model, cache_gib, *ours, context=CONTEXT, scheduler_flags=MAX)
    if peer:
        program, environment = vllm_in(peer)
        theirs = [*MAX, "--load-format", "dummy"]
        yield lambda: Vllm(program, model, *theirs, context=CONTEXT, environment=environment)


def vllm_in(folder: Path) -> tuple[Sequence[str | Path], dict[str, str]]:
    """The command that starts vLLM and its environment variables, from a virtual environment or from unpacked packages.

    Raises BenchError for a folder that contains neither a virtual environment nor unpacked packages.
    """
    if (folder / "venv").is_dir():
        return cpu_build(folder, CPU_CACHE_GIB)
    if (folder / "vllm" / "vllm").is_dir():
        # The packed packages do not contain FlashInfer. On Hopper vLLM uses FlashInfer's sampler by default, although
        # greedy requests do not need it.
        environment = {"PYTHONPATH": str((folder / "vllm").absolute()), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"], environment
    raise BenchError(f"{folder} has neither venv/ nor vllm/vllm/, which `python -m bench.gpu.pack join` unpacks there")


def run(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Measure all loads, and add the figures of each load to `rows` and to the output file. Raises BenchError if a
    system fails.
    """
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
    """The figures of one load on one system."""
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
