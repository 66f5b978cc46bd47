"""Measures the cost of HTTP: the same loads to pagewire over gRPC, to pagewire over HTTP, and to vLLM's server.

python -m bench gateway [--peer DIR] [--loads 128x1,128x8,128x32] [--rounds 2]

`pagewire_client serve` sends completions to the scheduler itself, and chats through the gateway process. Prompts are
words of one token, fewer in chats, whose template adds tokens. Each event counts as one token; if `usage` at the end
reports more, they are counted then.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from tokenizers import Tokenizer

from bench.loads.drive import BenchError, Stream, System
from bench.loads.load import CACHE_GIB, LOADS, choose
from bench.measurements.measure import Measurement, measure
from bench.measurements.report import COLUMNS, add_row, new_table
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import vllm_on_cpu
from bench.systems.processes import end_on_signals
from pagewire_client.http.gateway import free_address, is_ready
from worker_service.loading.model_store import find_model

READY_SECONDS = 60.0


class Http:
    """A server with OpenAI's HTTP API. A prompt's numbers are indices into `words`."""

    def __init__(
        self, name: str, url: str, pids: Callable[[], list[int]], words: Sequence[str], *, chats: bool = False
    ) -> None:
        self.name, self._url, self.pids, self._words = name, url, pids, words
        self._chats = chats
        self.start_seconds = 0.0

    def _body(self, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        text = "".join(self._words[place] for place in prompt)
        asked = {"messages": [{"role": "user", "content": text}]} if self._chats else {"prompt": text}
        return asked | {"model": model, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}

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


def words_of(directory: Path) -> list[str]:
    """Words with a leading space that are always one token."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    words = [f" {piece[1:]}" for piece in sorted(tokenizer.get_vocab()) if piece[0] in "Ġ▁" and piece[1:].isalpha()]
    return [word for word in words if word.isascii() and len(tokenizer.encode(word, add_special_tokens=False)) == 1]


@contextmanager
def serving(target: str) -> Iterator[tuple[str, int]]:
    """Run `pagewire_client serve`: its URL and process id. Raises BenchError if it does not start."""
    address = free_address()
    command = [sys.executable, "-m", "pagewire_client", "serve", "--target", target, "--listen", address]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not is_ready(f"http://{address}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"the HTTP server was not ready within {READY_SECONDS:g} s")
            time.sleep(0.1)
        yield f"http://{address}", process.pid
    finally:
        process.terminate()
        process.wait()


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
        ours = stack.enter_context(Pagewire(directory, CACHE_GIB))
        url, pid = stack.enter_context(serving(ours.target))
        through = Http("over HTTP", url, lambda: [*ours.pids(), pid], words)
        chats = Http("through the gateway", url, lambda: [*ours.pids(), pid], words, chats=True)
        systems: list[System] = [ours, through, chats]
        if arguments.peer:
            vllm = stack.enter_context(vllm_on_cpu(arguments.peer, CACHE_GIB))
            systems.append(Http(f"{vllm.name} {vllm.version}", vllm.url, vllm.pids, words))

        async def measure_all() -> dict[str, Measurement]:
            return {load.title: await measure(systems, load, len(words), arguments.rounds) for load in loads}

        found = asyncio.run(measure_all())
    table = new_table("load", "system", *(heading for heading, _ in COLUMNS.values()))
    for title, measurement in found.items():
        figures = {name: asdict(of) for name, of in measurement.figures.items()}
        for name, row in figures.items():
            add_row(table, [title, name], row, {column: cell for column, (_, cell) in COLUMNS.items()})
        over_http = (through.name, chats.name)
        for mine, name in product(over_http, (name for name in figures if name not in over_http)):
            ratios = {column: figures[mine][column] / value for column, value in figures[name].items()}
            add_row(table, ["", f"{mine} / {name}"], ratios, dict.fromkeys(COLUMNS, "{:.2f}"))
    Console(file=sys.stdout, width=200).print(table)


if __name__ == "__main__":
    main()
