"""Compares models whose layers are of different kinds with vLLM's CPU build: windows, states and latents.

python -m bench kinds [--peer DIR] [--models lfm2-350m,…] [--rounds 1]

Both systems serve published shapes with random weights, one after the other, because two models do not fit the memory.
Decodes are 1, 8 and 32 streams. Prompts of 512 and 2,048 tokens are sent one at a time. The last line is JSON.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.gpu.shapes import write_model
from bench.loads.drive import BenchError
from bench.loads.load import CACHE_GIB, streams
from bench.measurements.measure import measure
from bench.serving.kind_shapes import KINDS
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import Vllm, cpu_build
from bench.systems.processes import end_on_signals
from pagewire_client import ServerError

CONTEXT = 2304
DECODES = tuple(streams(128, 64, number, num_requests=2 * number) for number in (1, 8, 32))
PROMPTS = tuple(streams(tokens, 2, 1, num_requests=3) for tokens in (512, 2048))


def systems(model: Path, peer: Path | None) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Each system's name, and a function that starts it."""
    dummy = ("--load-format", "dummy")
    yield Pagewire.name, lambda: Pagewire(model, CACHE_GIB, *dummy, "--no-forms", context=CONTEXT)
    if peer is not None:
        program, environment = cpu_build(peer, CACHE_GIB)
        yield Vllm.name, lambda: Vllm(program, model, *dummy, context=CONTEXT, environment=environment)


def figures_of(name: str, folder: Path, peer: Path | None, rounds: int) -> dict[str, dict[str, float | str]]:
    """Output tokens per second of decodes, and prompt tokens per second until the first token, by system and load."""
    write_model(KINDS[name], folder)
    found: dict[str, dict[str, float | str]] = {}
    for system_name, start in systems(folder, peer):
        rates: dict[str, float | str] = {}
        try:
            with start() as system:
                for load in (*DECODES, *PROMPTS):
                    measured = asyncio.run(measure([system], load, KINDS[name]["vocab_size"], rounds))
                    figures = measured.figures[system.name]
                    tokens = load.arrivals[0].prompt_tokens
                    is_prompt = load in PROMPTS
                    rates[load.name] = 1e3 * tokens / figures.ttft_ms if is_prompt else figures.output_tokens_per_second
                    rates["memory_mib"] = figures.memory_mib
        except (BenchError, ServerError) as error:
            rates["error"] = str(error).strip().splitlines()[-1]
            sys.stderr.write(f"{name}: {system_name}: {error}\n")
        found[system_name] = rates
    return found


def table(results: dict[str, dict[str, dict[str, float | str]]]) -> str:
    """A Markdown table with a row for each model and load."""
    lines = ["| model | load | pagewire tok/s | vLLM tok/s | ratio |", "|---|---|---|---|---|"]
    for model, by_system in results.items():
        ours, theirs = by_system.get(Pagewire.name, {}), by_system.get(Vllm.name, {})
        for load in dict.fromkeys([*ours, *theirs]):
            one, other = ours.get(load), theirs.get(load)
            cells = [f"{value:.1f}" if isinstance(value, float) else str(value or "") for value in (one, other)]
            both = isinstance(one, float) and isinstance(other, float)
            lines.append(f"| {model} | {load} | {' | '.join(cells)} | {f'{one / other:.2f}' if both else ''} |")  # type: ignore[operator]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="the folder of vLLM's CPU build")
    parser.add_argument("--models", default=",".join(KINDS), help=f"names, of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=1, help="how often each load is run (default 1)")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if unknown := [model for model in models if model not in KINDS]:
        parser.error(f"there is no model {unknown[0]!r} here, but {', '.join(KINDS)}")
    end_on_signals()
    results = {}
    for model in models:
        with tempfile.TemporaryDirectory() as temporary:
            results[model] = figures_of(model, Path(temporary) / "model", arguments.peer, arguments.rounds)
        sys.stdout.write(table({model: results[model]}) + "\n\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
