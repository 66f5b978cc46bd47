"""Compares the token rates of pagewire and llama.cpp with the weights of a GGUF file, in turn on one machine.

python -m bench packed FILE --peer llama-batched-bench [--quantization gguf,int4] [--streams 1,8,32] [--rounds 3]

Prints output tokens per second of streams that begin at once with 128 prompt and 128 output tokens, prompts included,
and prompt tokens per second of a single prompt of 512. pagewire is measured by a client over gRPC, llama.cpp by
`llama-batched-bench` in one process with as many threads. Build it from the sources in the Python package
llama-cpp-python, with `-DGGML_NATIVE=ON`.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from bench.loads.drive import drive
from bench.loads.load import CONTEXT, streams
from bench.systems.pagewire_system import Pagewire
from bench.systems.processes import end_on_signals

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
LONG_PROMPT_TOKENS = 512
CACHE_GIB = 1
FIRST_IDS = 30_000
"""Prompts have ids below it, which occur in all measured models; the default model has 49,152 ids."""

_seeds = itertools.count()  # new prompts for each run, so that no prompt is in a prefix cache

System = Callable[[int, int, int], tuple[float, float]]
"""Measures streams, prompt and output tokens of each: output and prompt tokens per second."""


def ours(server: Pagewire, count: int, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    load = streams(prompt_tokens, output_tokens, count, num_requests=count)
    run = asyncio.run(drive(server, load, load.prompts(FIRST_IDS, next(_seeds))))
    return count * output_tokens / run.seconds, count * prompt_tokens / max(line.ttft for line in run.timelines)


def llama_cpp(program: Path, file: Path, count: int, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    threads = str(torch.get_num_threads())
    context = str(count * (prompt_tokens + output_tokens))
    command: list[str | Path] = [
        program, "-m", file, "-c", context, "-b", "2048", "-ub", "512", "-npp", str(prompt_tokens),
        "-ntg", str(output_tokens), "-npl", str(count), "-t", threads, "-tb", threads, "--output-format", "jsonl",
    ]  # fmt: skip
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return count * output_tokens / line["t"], line["speed_pp"]


def compare(systems: Mapping[str, System], counts: Sequence[int], rounds: int) -> None:
    def show(title: str, place: int, *numbers: int) -> None:
        found: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(rounds + 1):
            for name, system in systems.items():
                figure = system(*numbers)[place]
                if number:  # the first round is a warm-up
                    found[name].append(figure)
        peer = statistics.median(found["llama.cpp"])
        for name, figures in found.items():
            median, low, high = statistics.median(figures), min(figures), max(figures)
            sys.stdout.write(
                f"{title:16} {name:10} {median:8.1f} tok/s ({low:.1f} to {high:.1f}), {median / peer:.2f} x llama.cpp\n"
            )
        sys.stdout.flush()

    for count in counts:
        show(f"{count} streams", 0, count, PROMPT_TOKENS, OUTPUT_TOKENS)
    show(f"prompt of {LONG_PROMPT_TOKENS}", 1, 1, LONG_PROMPT_TOKENS, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", type=Path, required=True, help="the program llama-batched-bench")
    parser.add_argument("--quantization", default="none,gguf,int4")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    end_on_signals()
    systems: dict[str, System] = {}
    with ExitStack() as stack:
        for name in arguments.quantization.split(","):
            server = stack.enter_context(Pagewire(arguments.file, CACHE_GIB, "--quantization", name))
            systems[f"ours, {name}"] = partial(ours, server)
        systems["llama.cpp"] = partial(llama_cpp, arguments.peer, arguments.file)
        sys.stdout.write(f"{arguments.file.name}, {torch.get_num_threads()} threads, contexts of {CONTEXT} at most\n")
        compare(systems, [int(count) for count in arguments.streams.split(",")], arguments.rounds)


if __name__ == "__main__":
    main()
