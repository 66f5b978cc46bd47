"""Compares models whose layers are of different kinds with vLLM's CPU build and with transformers: windows, states and
latents.

python -m bench kinds [--peer DIR] [--transformers] [--models lfm2-350m,…] [--rounds 1]

All systems compute published shapes with random weights, one after the other, because two models do not fit the memory.
transformers generates static batches in one process, without a server, and is measured once. Decodes are 1, 8 and 32
streams. Prompts of 512 and 2,048 tokens are sent one at a time. "8,192 tokens, MiB" is the maximum of the KV cache that
one sequence of 8,192 tokens takes: computed from pagewire's groups of layers, and from the number of such sequences in
vLLM's log. With --loads none, only this is measured. The last line is JSON.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.gpu.shapes import write_model
from bench.loads.drive import BenchError
from bench.loads.load import CACHE_GIB, Load, streams
from bench.measurements.measure import measure
from bench.serving.kind_shapes import KINDS
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import Vllm, cpu_build
from bench.systems.processes import end_on_signals
from pagewire_client import ServerError

CONTEXT = 8192
TRANSFORMERS = "transformers"
LONGEST = f"{CONTEXT:,} tokens, MiB"
DECODES = tuple(streams(128, 64, number, num_requests=2 * number) for number in (1, 8, 32))
PROMPTS = tuple(streams(tokens, 2, 1, num_requests=3) for tokens in (512, 2048))


def systems(model: Path, peer: Path | None) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Each system's name, and a function that starts it."""
    dummy = ("--load-format", "dummy")
    yield Pagewire.name, lambda: Pagewire(model, CACHE_GIB, *dummy, "--no-forms", context=CONTEXT)
    if peer is not None:
        program, environment = cpu_build(peer, CACHE_GIB)
        yield Vllm.name, lambda: Vllm(program, model, *dummy, context=CONTEXT, environment=environment)


def figures_of(
    name: str, folder: Path, peer: Path | None, rounds: int, loads: Sequence[Load], *, beside_transformers: bool
) -> dict[str, dict[str, float | str]]:
    """Output tokens per second of decodes, prompt tokens per second until the first token, MiB of memory, and
    `LONGEST`, by system and load."""
    write_model(KINDS[name], folder)
    found: dict[str, dict[str, float | str]] = {}
    for system_name, start in systems(folder, peer):
        rates: dict[str, float | str] = {}
        try:
            with start() as system:
                rates[LONGEST] = sequence_mib(system)
                for load in loads:
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
    if beside_transformers:
        found[TRANSFORMERS] = {**of_transformers(folder, loads)}
    return found


def of_transformers(folder: Path, loads: Sequence[Load]) -> dict[str, float]:
    """The same rates."""
    from bench.systems.peer_transformers import Transformers

    model, rates = Transformers(folder, random_weights=True), {}
    for load in loads:
        tokens = load.arrivals[0].prompt_tokens
        rate = (
            tokens * model.output_tokens_per_second(streams(tokens, 1, 1, num_requests=1))
            if load in PROMPTS
            else model.output_tokens_per_second(load)
        )
        sys.stderr.write(f"{load.title}: transformers {rate:.1f} tok/s\n")
        rates[load.name] = rate
    return rates


def sequence_mib(system: Pagewire | Vllm) -> float:
    if isinstance(system, Pagewire):
        return asyncio.run(system.sequence_bytes(CONTEXT)) / 2**20
    return CACHE_GIB * 2**10 / system.sequences_in_cache()


def table(results: dict[str, dict[str, dict[str, float | str]]]) -> str:
    """A Markdown table with a row for each model and load."""
    lines = ["| model | load, tok/s | pagewire | vLLM | ratio | transformers | ratio |", f"|{'---|' * 7}"]
    for model, by_system in results.items():
        ours = by_system.get(Pagewire.name, {})
        for load in dict.fromkeys([*ours, *by_system.get(Vllm.name, {})]):
            cells = [_shown(one := ours.get(load))]
            for peer in (Vllm.name, TRANSFORMERS):
                other = by_system.get(peer, {}).get(load)
                both = isinstance(one, float) and isinstance(other, float)
                cells += [_shown(other), f"{one / other:.2f}" if both else ""]  # type: ignore[operator]
            lines.append(f"| {model} | {load} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else value or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="the folder of vLLM's CPU build")
    parser.add_argument("--transformers", action="store_true", help="measure transformers as well")
    parser.add_argument("--models", default=",".join(KINDS), help=f"names, of {', '.join(KINDS)}")
    parser.add_argument("--loads", choices=("all", "none"), default="all")
    parser.add_argument("--rounds", type=int, default=1, help="how often each load is run (default 1)")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if unknown := [model for model in models if model not in KINDS]:
        parser.error(f"there is no model {unknown[0]!r} here, but {', '.join(KINDS)}")
    loads = (*DECODES, *PROMPTS) if arguments.loads == "all" else ()
    end_on_signals()
    results = {}
    for model in models:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            results[model] = figures_of(
                model, folder, arguments.peer, arguments.rounds, loads, beside_transformers=arguments.transformers
            )
        sys.stdout.write(table({model: results[model]}) + "\n\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
