"""Measures the cost of HTTP: the same loads to pagewire over gRPC, as completions and chats over HTTP, and to vLLM.

python -m bench http [--peer DIR] [--loads 128x1,128x8,128x32] [--rounds 2]

All clients send texts of words of one token. Chats send fewer words, because the chat template adds tokens. Each event
counts as one token; if `usage` at the end reports more, they are counted then. Each way to the server has a cache salt,
so that no prompt is found in the prefix cache.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from tokenizers import Tokenizer

from bench.loads.drive import BenchError, Stream, System
from bench.loads.load import CACHE_GIB, LOADS, Load, choose
from bench.measurements.measure import measure
from bench.measurements.report import new_table
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import vllm_on_cpu
from bench.systems.processes import cpu_seconds, end_on_signals
from pagewire_client import Client, SamplingParams
from worker_service.loading.model_store import find_model

OURS = ("gRPC", "completions", "chats")
HEADINGS = ("output tok/s", "of gRPC's", "TTFT, ms", "ITL p99, ms", "front end, CPU s per 1,000 tokens")


class Grpc:
    """Texts over gRPC. A prompt's numbers are indices into `words`."""

    def __init__(self, server: Pagewire, words: Sequence[str]) -> None:
        self.name, self.pids, self._target, self._words = OURS[0], server.pids, server.target, words
        self.start_seconds = 0.0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async with Client(self._target) as client:
            await client.get_model()  # opens the gRPC connection before the measurement

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                text = "".join(self._words[place] for place in prompt)
                sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
                async for message in client.generate(text, sampling, cache_salt=self.name):
                    if message.token_ids:
                        yield len(message.token_ids)

            yield stream


class Http:
    """A server with OpenAI's HTTP API. A prompt's numbers are indices into `words`."""

    def __init__(
        self, name: str, url: str, pids: Callable[[], Sequence[int]], words: Sequence[str], *, chats: bool = False
    ) -> None:
        self.name, self._url, self.pids, self._words = name, url, pids, words
        self._chats = chats
        self.start_seconds = 0.0

    def _body(self, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        text = "".join(self._words[place] for place in prompt)
        asked = {"messages": [{"role": "user", "content": text}]} if self._chats else {"prompt": text}
        sampling = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        return asked | sampling | {"model": model, "cache_salt": self.name}

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as session:
            async with session.get("/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            path, num_template = "/v1/completions", 0
            if self._chats:
                path = "/v1/chat/completions"
                async with session.post(path, json=self._body(model, [0], 1)) as response:
                    num_template = (await response.json())["usage"]["prompt_tokens"] - 1

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                body = self._body(model, prompt[num_template:], output_tokens)
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                counted = 0
                async with session.post(path, json=body) as response:
                    if response.status != 200:
                        raise BenchError(f"{self.name} answered {response.status}: {await response.text()}")
                    async for line in response.content:
                        data = line.removeprefix(b"data:").strip()
                        if not data or data == b"[DONE]":
                            continue
                        event = json.loads(data)
                        if usage := event.get("usage"):
                            if usage["prompt_tokens"] != len(prompt):
                                raise BenchError(f"{self.name} read {usage['prompt_tokens']} tokens of {len(prompt)}")
                            tokens = usage["completion_tokens"] - counted
                        else:
                            is_text = any(
                                choice["delta"].get("content") if self._chats else choice["text"]
                                for choice in event["choices"]
                            )
                            tokens = int(is_text and counted < output_tokens)
                        if tokens:
                            counted += tokens
                            yield tokens

            yield stream


class Counted:
    """A system whose front ends' CPU seconds are counted in each run. The first run is the warm-up."""

    def __init__(self, system: System, front_ends: Sequence[int]) -> None:
        self._system, self._front_ends = system, front_ends
        self.name, self.start_seconds = system.name, system.start_seconds
        self.cpu: list[float] = []

    def pids(self) -> Sequence[int]:
        return self._system.pids()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async with self._system.connect() as stream:
            before = cpu_seconds(self._front_ends)
            yield stream
            self.cpu.append(cpu_seconds(self._front_ends) - before)


def front_ends_of(server: Pagewire) -> list[int]:
    """The process ids of a scheduler's front ends."""
    children = [child for pid in server.pids() for child in psutil.Process(pid).children(recursive=True)]
    return [child.pid for child in children if "scheduler_service.frontend" in child.cmdline()]


def words_of(directory: Path) -> list[str]:
    """Words with a leading space that are always one token."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    words = [f" {piece[1:]}" for piece in sorted(tokenizer.get_vocab()) if piece[0] in "Ġ▁" and piece[1:].isalpha()]
    return [word for word in words if word.isascii() and len(tokenizer.encode(word, add_special_tokens=False)) == 1]


async def compare(systems: Sequence[System], load: Load, num_words: int, rounds: int) -> list[dict[str, Any]]:
    """Measure one load. Returns the figures of each system."""
    counted = {system.name: system for system in systems if isinstance(system, Counted)}
    for system in counted.values():
        system.cpu.clear()
    measured = await measure(systems, load, num_words, rounds)
    rates = {name: found.output_tokens_per_second for name, found in measured.figures.items()}
    num_tokens = rounds * sum(arrival.output_tokens for arrival in load.arrivals)
    return [
        {
            "load": load.title,
            "system": name,
            "output_tokens_per_second": found.output_tokens_per_second,
            "of_grpc": rates[name] / rates[OURS[0]],
            "ttft_ms": found.ttft_ms,
            "itl_p99_ms": found.itl_p99_ms,
            "cpu_seconds": 1000 * sum(counted[name].cpu[1:]) / num_tokens if name in counted else None,
        }
        for name, found in measured.figures.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="as for bench serving")
    parser.add_argument("--loads", default="128x1,128x8,128x32,128x64")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    end_on_signals()
    loads = choose(arguments.loads, LOADS)
    default = find_model("default", Path("~/.cache/pagewire").expanduser())
    directory = arguments.peer / "model" if arguments.peer else default.path
    words = words_of(directory)
    with ExitStack() as stack:
        server = stack.enter_context(Pagewire(directory, CACHE_GIB))
        ways: list[System] = [
            Grpc(server, words),
            Http(OURS[1], server.http_url, server.pids, words),
            Http(OURS[2], server.http_url, server.pids, words, chats=True),
        ]
        systems: list[System] = [Counted(way, front_ends_of(server)) for way in ways]
        if arguments.peer:
            vllm = stack.enter_context(vllm_on_cpu(arguments.peer, CACHE_GIB))
            systems.append(Http(f"{vllm.name} {vllm.version}", vllm.url, vllm.pids, words))

        async def measure_all() -> list[dict[str, Any]]:
            return [row for load in loads for row in await compare(systems, load, len(words), arguments.rounds)]

        found = asyncio.run(measure_all())
    table = new_table("load", "system", *HEADINGS)
    for row in found:
        cpu = "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.3f}"
        figures = [f"{row[name]:{form}}" for name, form in (("output_tokens_per_second", ".1f"), ("of_grpc", ".3f"),
                                                            ("ttft_ms", ".0f"), ("itl_p99_ms", ".1f"))]  # fmt: skip
        table.add_row(row["load"], row["system"], *figures, cpu)
    Console(file=sys.stdout, width=200).print(table)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
