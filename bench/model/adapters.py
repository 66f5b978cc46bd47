"""Measures the cost of adapters: the same requests to one server with the base model, 1, 4 and 16 adapters in turn.

python -m bench adapters [--model default] [--sequences 16,32] [--rank 16] [--adapters 1,4,16] [--rounds 3]
python -m bench adapters --peer DIR        measures vLLM too; DIR as for bench serving

The adapters have random weights for all linear layers, and share the requests. The last line has three times to first
token: adapter on the device, in the worker's host memory, and to be sent to the worker first.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import aiohttp
import torch
from safetensors.torch import save_file

from bench.loads.drive import BenchError
from bench.loads.load import CACHE_GIB, CONTEXT
from bench.systems.peer_vllm import MODEL, Vllm, vllm_on_cpu
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.model_store import find_model
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.registry import read_config

OUTPUT_TOKENS = 128
PROMPT_TOKENS = 128
TIMES = 18
EXTRA = 2
"""Adapters beyond the capacity of the worker's host memory."""


def write_adapters(folder: Path, model: str, count: int, rank: int) -> None:
    """PEFT's format, in folders a0, a1 and so on."""
    config = read_config(Checkpoint(find_model(model, Path("~/.cache/pagewire").expanduser()).path).config)
    if not isinstance(config, DecoderConfig):
        raise SystemExit("bench adapters: this model does not run natively")
    places = Decoder(config, torch.float32, torch.device("meta")).allocate_adapters(1, rank)
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        tensors = {}
        for name, place in places.items():
            module = f"base_model.model.{name}"
            inputs = place.weights.a.shape[3]
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.02
            tensors[f"{module}.lora_B.weight"] = torch.randn(place.num_outputs, rank, generator=draw) * 0.02
        (folder / f"a{number}").mkdir()
        save_file(tensors, folder / f"a{number}" / "adapter_model.safetensors")
        (folder / f"a{number}" / "adapter_config.json").write_text(
            json.dumps(
                {
                    "peft_type": "LORA",
                    "r": rank,
                    "lora_alpha": rank,
                    "target_modules": sorted({name.rpartition(".")[2] for name in places}),
                }
            )
        )


Call = Callable[[Sequence[int], int, str], Awaitable[None]]
"""Generates tokens after a prompt with the named adapter; empty for the base model."""


def ours(client: Client) -> Call:
    async def call(prompt: Sequence[int], max_tokens: int, name: str) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        await collect(client, prompt, sampling, lora_name=name)

    return call


def theirs(session: aiohttp.ClientSession) -> Call:
    async def call(prompt: Sequence[int], max_tokens: int, name: str) -> None:
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        async with session.post("/v1/completions", json=body | {"model": name or MODEL}) as response:
            if response.status != 200:
                raise BenchError(f"vLLM answered {response.status}: {await response.text()}")
            await response.read()

    return call


async def rate(call: Call, num_sequences: int, names: Sequence[str], seed: int) -> float:
    """Output tokens per second of simultaneous streams."""

    async def one(number: int) -> None:
        prompt = [1000 + (number * 7919 + seed * 104729 + i * 31) % 20000 for i in range(PROMPT_TOKENS)]
        await call(prompt, OUTPUT_TOKENS, names[number % len(names)])

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(num_sequences)))
    return num_sequences * OUTPUT_TOKENS / (time.perf_counter() - began)


async def first_token_seconds(call: Call, names: Sequence[str]) -> float:
    """Median time to first token. Requests are sent one by one with the adapters in turn."""
    found = []
    for number in range(max(TIMES, 2 * len(names))):
        began = time.perf_counter()
        await call([1000 + number] * 16, 1, names[number % len(names)])
        found.append(time.perf_counter() - began)
    return statistics.median(found)


async def measure(
    servers: Mapping[str, LocalServer | Vllm], sequences: Sequence[int], counts: Sequence[int], rounds: int
) -> None:
    async with AsyncExitStack() as stack:
        calls: dict[str, Call] = {}
        for name, server in servers.items():
            if isinstance(server, Vllm):
                session = aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=None))
                calls[name] = theirs(await stack.enter_async_context(session))
            else:
                client = await stack.enter_async_context(Client(server.target))
                await client.wait_until_serving(600)
                calls[name] = ours(client)
        adapters = {"base": [""], **{f"{count} adapters": names_of(count) for count in counts}}
        loads = [(server, what) for what in adapters for server in servers]
        for num_sequences in sequences:
            rates: dict[tuple[str, str], list[float]] = {load: [] for load in loads}
            for number in range(rounds):
                first = number % len(loads)
                for load in (*loads[first:], *loads[:first]):
                    rates[load].append(await rate(calls[load[0]], num_sequences, adapters[load[1]], number))
            for (which, what), found in rates.items():
                ratio = statistics.median(mine / base for mine, base in zip(found, rates[which, "base"], strict=True))
                sys.stdout.write(
                    f"{num_sequences:3} sequences, {which}, {what:11}: {statistics.median(found):7.1f} tok/s, "
                    f"{ratio:.2f} x base\n"
                )
                sys.stdout.flush()
        # With one adapter more than slots, used in turn, each has lost its slot before its next request. With two more
        # than host memory has room for, each must be sent again.
        few = max(counts) + 1
        for which, call in calls.items():
            there, copied, brought = [
                1e3 * await first_token_seconds(call, names_of(count)) for count in (1, few, few + EXTRA)
            ]
            sys.stdout.write(
                f"first token, {which}: {there:.0f} ms of an adapter in a slot, {copied:.0f} ms of one that is copied "
                f"there, {brought:.0f} ms of one that is brought first\n"
            )


def names_of(count: int) -> list[str]:
    return [f"a{number}" for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--sequences", default="16,32")
    parser.add_argument("--adapters", default="1,4,16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="as for bench serving; its model is served")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.adapters.split(",")]
    sequences = [int(count) for count in arguments.sequences.split(",")]
    if arguments.peer:
        arguments.model = str(arguments.peer / "model")
    most = max(counts)
    room = ["--max-loras", str(most), "--max-lora-rank", str(arguments.rank), "--max-cpu-loras", str(most + 1)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_adapters(Path(folder), arguments.model, most + 1 + EXTRA, arguments.rank)
        common = ["--max-model-len", str(CONTEXT), "--kv-cache-memory", str(CACHE_GIB), "--no-forms"]
        local = LocalServer(
            arguments.model, worker_arguments=[*common, *room], scheduler_arguments=["--lora-dir", folder]
        )
        servers: dict[str, LocalServer | Vllm] = {"pagewire": stack.enter_context(local)}
        if arguments.peer:
            modules = [f"{name}={folder}/{name}" for name in names_of(most + 1 + EXTRA)]
            vllm = vllm_on_cpu(arguments.peer, CACHE_GIB, "--enable-lora", *room, "--lora-modules", *modules)
            servers["vLLM"] = stack.enter_context(vllm)
        asyncio.run(measure(servers, sequences, counts, arguments.rounds))


if __name__ == "__main__":
    main()
