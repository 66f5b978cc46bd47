"""What HTTP costs: loads on our services over gRPC, on the same services through the gateway, and on vLLM's server.

    python -m bench.gateway [--peer DIR] [--loads 128x1,128x8,128x32] [--rounds 2]

The gateway takes prompts as texts, not as token ids, so prompts are words that are one token each; of gRPC and of HTTP,
all requests are the same. An event counts as one token; those that `usage` names beyond that are counted at the end.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import aiohttp
from rich.console import Console
from tokenizers import Tokenizer

from bench.__main__ import CACHE_GIB, choose
from bench.drive import BenchError, Stream, System
from bench.load import LOADS
from bench.measure import Measurement, measure
from bench.pagewire_system import Pagewire
from bench.peer_vllm import Vllm
from bench.processes import end_on_signals
from bench.report import COLUMNS, add_row, new_table
from pagewire_client.gateway import Gateway, free_address
from worker_service.loading.model_store import find_model

READY_SECONDS = 60.0


class Http:
    """A server of OpenAI's HTTP API that runs. A prompt's numbers are places in `words`."""

    def __init__(self, name: str, url: str, pids: Callable[[], list[int]], words: Sequence[str]) -> None:
        self.name, self._url, self.pids, self._words = name, url, pids, words
        self.start_seconds = 0.0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as session:
            async with session.get("/v1/models") as response:
                model = (await response.json())["data"][0]["id"]

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                body = {
                    "model": model,
                    "prompt": "".join(self._words[place] for place in prompt),
                    "max_tokens": output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                counted = 0
                async with session.post("/v1/completions", json=body) as response:
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
                            tokens = int(any(choice["text"] for choice in event["choices"]) and counted < output_tokens)
                        if tokens:
                            counted += tokens
                            yield tokens

            yield stream


def words_of(directory: Path) -> list[str]:
    """Words with a space before them that are one token each, wherever they are."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    words = [f" {piece[1:]}" for piece in sorted(tokenizer.get_vocab()) if piece[0] in "Ġ▁" and piece[1:].isalpha()]
    return [word for word in words if word.isascii() and len(tokenizer.encode(word, add_special_tokens=False)) == 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="as of python -m bench")
    parser.add_argument("--loads", default="128x1,128x8,128x32,128x64")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    end_on_signals()
    loads = choose(arguments.loads, list(LOADS))
    default = find_model("default", Path("~/.cache/pagewire").expanduser())
    directory = arguments.peer / "model" if arguments.peer else default.path
    words = words_of(directory)
    with ExitStack() as stack:
        ours = stack.enter_context(Pagewire(directory, CACHE_GIB))
        gateway = stack.enter_context(Gateway(ours.target, free_address()))
        gateway.wait_until_ready(READY_SECONDS)
        through = Http("through the gateway", gateway.url, lambda: [*ours.pids(), gateway.process.pid], words)
        systems: list[System] = [ours, through]
        if arguments.peer:
            vllm = stack.enter_context(Vllm(arguments.peer, CACHE_GIB))
            systems.append(Http(f"{vllm.name} {vllm.version}", vllm.url, vllm.pids, words))

        async def measure_all() -> dict[str, Measurement]:
            return {load.title: await measure(systems, load, len(words), arguments.rounds) for load in loads}

        found = asyncio.run(measure_all())
    table = new_table("load", "system", *(heading for heading, _ in COLUMNS.values()))
    for title, measurement in found.items():
        figures = {name: asdict(of) for name, of in measurement.figures.items()}
        for name, row in figures.items():
            add_row(table, [title, name], row, {column: cell for column, (_, cell) in COLUMNS.items()})
        mine = figures[through.name]
        for name in (name for name in figures if name != through.name):
            ratios = {column: mine[column] / value for column, value in figures[name].items()}
            add_row(table, ["", f"gateway / {name}"], ratios, dict.fromkeys(COLUMNS, "{:.2f}"))
    Console(file=sys.stdout, width=200).print(table)


if __name__ == "__main__":
    main()
