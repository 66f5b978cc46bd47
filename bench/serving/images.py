"""Compares prompts with images with vLLM's CPU build and with transformers, for SmolVLM 256M's shape.

python -m bench images [--peer DIR] [--images 16] [--tokens 512] [--no-transformers]

All systems have random weights and run one after the other. Each image has 64 tokens, and each answer one token, so the
time of an answer is the time to its first token. Then a text stream runs alone, and beside a client that sends images.
The last line is JSON.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import numpy as np

from bench.loads.drive import BenchError
from bench.loads.load import CACHE_GIB
from bench.serving.image_model import data_url, draw, write_image_model
from bench.systems.pagewire_system import Pagewire
from bench.systems.peer_vllm import Vllm, cpu_build
from bench.systems.processes import end_on_signals
from pagewire_client import ServerError

CONTEXT = 2048
CLIENTS = 8
TRANSFORMERS = "transformers"
LESS_IS_BETTER = "ms"


class Server:
    """A client of one system's chats."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session, self._model = session, model
        self._seeds = itertools.count(1)

    def fresh(self) -> str:
        """An image that was not sent before."""
        return data_url(next(self._seeds))

    async def chat(self, image: str | None, tokens: int) -> list[float]:
        """Seconds from the request to each event with a choice. Raises BenchError."""
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}}] if image else []
        body = {
            "model": self._model, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "What does this show?"}]}],
        }  # fmt: skip
        began, found = time.perf_counter(), []
        async with self._session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise BenchError(f"the answer is {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise BenchError(f"the answer is {event['error']}")
                if any(choice["delta"].get("content") or choice.get("finish_reason") for choice in event["choices"]):
                    found.append(time.perf_counter() - began)
        return found

    async def first(self, image: str) -> float:
        return (await self.chat(image, 1))[-1]


async def measure(url: str, images: int, tokens: int) -> dict[str, float]:
    """Figures of a running server."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        async with session.get("/v1/models") as response:
            server = Server(session, (await response.json())["data"][0]["id"])
        await server.first(server.fresh())  # the first image of a process costs more
        await server.chat(None, 8)
        alone = [await server.first(server.fresh()) for _ in range(images)]
        sent = [server.fresh() for _ in range(max(images, CLIENTS))]
        began = time.perf_counter()
        waiting = iter(sent)

        async def client() -> None:
            for image in waiting:
                await server.first(image)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        together = len(sent) / (time.perf_counter() - began)
        same = server.fresh()
        await server.first(same)
        again = [await server.first(same) for _ in range(images)]
        quiet = np.diff(await server.chat(None, tokens))
        beside, number = await _beside_images(server, tokens)
    return {
        "images/s, 1 client": 1 / mean(alone),
        f"images/s, {CLIENTS} clients": together,
        "first token, new image, ms": 1e3 * median(alone),
        "first token, same image again, ms": 1e3 * median(again),
        **{f"between tokens, p{part}, ms": 1e3 * float(np.percentile(quiet, part)) for part in (50, 99)},
        **{f"between tokens beside images, p{part}, ms": 1e3 * float(np.percentile(beside, part)) for part in (50, 99)},
        "images/s beside a stream": number,
    }


async def _beside_images(server: Server, tokens: int) -> tuple[Any, float]:
    """Seconds between events of a text stream, and the images per second of the client beside it."""
    began, answered = time.perf_counter(), 0

    async def images() -> None:
        nonlocal answered
        while True:
            await server.first(server.fresh())
            answered += 1

    sender = asyncio.create_task(images())
    try:
        times = await server.chat(None, tokens)
        return np.diff(times), answered / (time.perf_counter() - began)
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


def measure_transformers(folder: Path, images: int) -> dict[str, float]:
    """Time to the first token in one process, without a server."""
    import torch
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    ids = torch.tensor([[5] * 8 + [config.image_token_id] * 64 + [6] * 12])
    times = []
    for seed in range(images + 1):
        picture, began = draw(seed), time.perf_counter()
        pixels = processor(images=[picture], return_tensors="pt")
        with torch.inference_mode():
            model(ids, pixel_values=pixels["pixel_values"].bfloat16(), logits_to_keep=1)
        times.append(time.perf_counter() - began)
    return {"images/s, 1 client": 1 / mean(times[1:]), "first token, new image, ms": 1e3 * median(times[1:])}


def systems(model: Path, peer: Path | None) -> Iterator[tuple[str, Any]]:
    """Each server's name, and a function that starts it and returns it with its address."""
    dummy = ("--load-format", "dummy")
    yield Pagewire.name, lambda: Pagewire(model, CACHE_GIB, *dummy, "--no-forms", context=CONTEXT)
    if peer is not None:
        program, environment = cpu_build(peer, CACHE_GIB)
        # Without the flag, vLLM encodes 32 images at start.
        flags = (*dummy, "--skip-mm-profiling")
        yield Vllm.name, lambda: Vllm(program, model, *flags, context=CONTEXT, environment=environment)


def figures_of(start: Any, images: int, tokens: int) -> dict[str, float | str]:
    running: AbstractContextManager[Any] = start()
    with running as system:
        url = system.http_url if isinstance(system, Pagewire) else system.url
        return {**asyncio.run(measure(url, images, tokens))}


def table(results: dict[str, dict[str, float | str]]) -> str:
    """A Markdown table with a row for each figure. A ratio above 1 says that pagewire is better."""
    names = list(results)
    header = ["figure", *names, *(f"ratio to {name}" for name in names[1:])]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for figure in dict.fromkeys(itertools.chain(*results.values())):
        values = [results[name].get(figure) for name in names]
        ours, ratios = values[0], []
        for other in values[1:]:
            both = isinstance(ours, float) and isinstance(other, float) and ours > 0 and other > 0
            ratio = 0.0 if not both else other / ours if figure.endswith(LESS_IS_BETTER) else ours / other  # type: ignore[operator]
            ratios.append(f"{ratio:.2f}" if both else "")
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value or "") for value in values]
        lines.append(f"| {' | '.join([figure, *cells, *ratios])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="the folder of vLLM's CPU build")
    parser.add_argument("--images", type=int, default=16, help="images of each load (default 16)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the text stream (default 512)")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    arguments = parser.parse_args()
    end_on_signals()
    results: dict[str, dict[str, float | str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_image_model(folder)
        for name, start in systems(folder, arguments.peer):
            try:
                results[name] = figures_of(start, arguments.images, arguments.tokens)
            except (BenchError, ServerError) as error:
                results[name] = {"error": str(error).strip().splitlines()[-1]}
                sys.stderr.write(f"{name}: {error}\n")
            sys.stderr.write(f"{name}: {results[name]}\n")
        if not arguments.no_transformers:
            results[TRANSFORMERS] = {**measure_transformers(folder, arguments.images)}
    sys.stdout.write(f"{table(results)}\n\n{json.dumps(results)}\n")


if __name__ == "__main__":
    main()
