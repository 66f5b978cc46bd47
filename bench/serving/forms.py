"""Measures the cost of a JSON schema: pagewire and vLLM answer the same prompts with and without one, in turn.

python -m bench forms [--peer DIR] [--sequences 1,8,32] [--rounds 3]

Outputs are sampled and have 128 tokens: the schema requires a longer list, and without it outputs continue after
end-of-sequence tokens.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bench.loads.drive import BenchError
from bench.loads.load import CACHE_GIB
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import MODEL, Vllm, vllm_on_cpu
from bench.systems.processes import end_on_signals
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from worker_service.loading.model_store import find_model

OUTPUT_TOKENS = 128
PROMPT_TOKENS = 128
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": OUTPUT_TOKENS,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "people": {"type": "integer"},
            "kind": {"enum": ["city", "village"]},
            "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        },
        "required": ["name", "people", "kind", "rivers"],
        "additionalProperties": False,
    },
}
Call = Callable[[Sequence[int], bool, int], Awaitable[int]]
"""Generates an output after a prompt, with or without the schema, from a seed. Returns its number of tokens."""


def ours(client: Client) -> Call:
    async def call(prompt: Sequence[int], has_form: bool, seed: int) -> int:
        form = {"json_schema": json.dumps(SCHEMA)} if has_form else {"ignore_eos": True}
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=1, seed=seed, **form)
        (output,) = (await collect(client, prompt, sampling)).outputs
        return len(output.token_ids)

    return call


def theirs(session: aiohttp.ClientSession) -> Call:
    async def call(prompt: Sequence[int], has_form: bool, seed: int) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "places", "schema": SCHEMA}}
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 1, "seed": seed,
            **({"response_format": form} if has_form else {"ignore_eos": True}),
        }  # fmt: skip
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise BenchError(f"vLLM answered {response.status}: {answer}")
            return int(answer["usage"]["completion_tokens"])

    return call


async def rate(call: Call, num_sequences: int, has_form: bool, seed: int) -> float:
    """Output tokens per second of simultaneous requests."""
    prompts = [
        [1000 + (number * 7919 + seed * 104729 + place * 31) % 20000 for place in range(PROMPT_TOKENS)]
        for number in range(num_sequences)
    ]
    began = time.perf_counter()
    counts = await asyncio.gather(*(call(prompt, has_form, number) for number, prompt in enumerate(prompts)))
    if set(counts) != {OUTPUT_TOKENS}:
        raise BenchError(f"outputs have {sorted(set(counts))} tokens")
    return num_sequences * OUTPUT_TOKENS / (time.perf_counter() - began)


async def compare(name: str, call: Call, num_sequences: int, rounds: int) -> None:
    await rate(call, num_sequences, has_form=True, seed=0)
    pairs: list[tuple[float, float]] = []
    for number in range(1, rounds + 1):
        order = (False, True) if number % 2 else (True, False)
        found = {has_form: await rate(call, num_sequences, has_form, 2 * number + has_form) for has_form in order}
        pairs.append((found[False], found[True]))
    without, with_form = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    ratio = statistics.median(formed / free for free, formed in pairs)
    sys.stdout.write(
        f"{num_sequences:3} sequences, {name:13}: {without:6.1f} tok/s without, {with_form:6.1f} with: {ratio:.2f}\n"
    )
    sys.stdout.flush()


async def measure(target: str, vllm: Vllm | None, sequences: Sequence[int], rounds: int) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with Client(target) as client, aiohttp.ClientSession(vllm.url if vllm else None, timeout=timeout) as session:
        for num_sequences in sequences:
            await compare("pagewire", ours(client), num_sequences, rounds)
            if vllm:
                await compare(f"{vllm.name} {vllm.version}", theirs(session), num_sequences, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="as for bench serving")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    end_on_signals()
    sequences = [int(count) for count in arguments.sequences.split(",")]
    default = find_model("default", Path("~/.cache/pagewire").expanduser())
    with ExitStack() as stack:
        directory = arguments.peer / "model" if arguments.peer else default.path
        pagewire = stack.enter_context(Pagewire(directory, CACHE_GIB))
        vllm = stack.enter_context(vllm_on_cpu(arguments.peer, CACHE_GIB)) if arguments.peer else None
        asyncio.run(measure(pagewire.target, vllm, sequences, arguments.rounds))


if __name__ == "__main__":
    main()
