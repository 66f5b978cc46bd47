"""Makes the recordings of docs/pictures: python -m bench.pictures.record [NAME …].

Each scene starts a scheduler and one or two workers with the default model and a pool of a few blocks, and sends the
requests that show one idea. The prompts are this file's own texts, because a recording contains them.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from pagewire_client import Client, SamplingParams
from pagewire_client.local import ADMIN, ServiceProcess

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
START_SECONDS = 600.0
TEXT = (
    "The scheduler keeps every queue, every budget and every block table. A worker keeps weights and the memory of "
    "keys and values. A block holds sixteen tokens. A table lists the blocks of a sequence in the order of positions. "
)
SONG = " ".join(["One block, two blocks, three blocks, four blocks."] * 8)


class Running(NamedTuple):
    client: Client
    workers: list[ServiceProcess]

    async def ask(self, name: str, prompt: str, max_tokens: int, n: int = 1) -> None:
        """Read a request's whole output."""
        sampling = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, seed=7, temperature=1.0 if n > 1 else 0)
        async for _ in self.client.generate(prompt, sampling, request_id=name):
            pass


class Scene(NamedTuple):
    play: Callable[[Running], Awaitable[None]]
    worker: tuple[str, ...]
    scheduler: tuple[str, ...] = ()
    num_workers: int = 1


async def _blocks(running: Running) -> None:
    await asyncio.gather(
        *(running.ask(f"request {i + 1}", TEXT[: 60 + 90 * i], 80 - 30 * i) for i in range(3)),
    )
    await running.ask("request 4", TEXT[40:], 30)


async def _chunked_prefill(running: Running) -> None:
    decodes = [asyncio.create_task(running.ask(f"decode {i + 1}", TEXT[i * 20 : 90 + i * 20], 30)) for i in range(3)]
    await running.ask("warm", "Hello", 4)
    await running.ask("long prompt", TEXT * 6, 12)
    await asyncio.gather(*decodes)


async def _copy_on_write(running: Running) -> None:
    await running.ask("request", TEXT[:190], 24, n=4)


async def _preemption(running: Running) -> None:
    await asyncio.gather(*(running.ask(f"request {i + 1}", TEXT[20 * i : 20 * i + 180], 90) for i in range(4)))


async def _prefix_cache(running: Running) -> None:
    await running.ask("first", TEXT + "What is a block?", 8)
    await asyncio.gather(
        running.ask("same beginning", TEXT + "What is a worker?", 8),
        running.ask("same beginning again", TEXT + "Which part keeps the budget?", 8),
        running.ask("another beginning", "In short: " + TEXT, 8),
    )
    await running.ask("first, repeated", TEXT + "What is a block?", 8)


async def _placement(running: Running) -> None:
    songs = [running.ask(f"song {i + 1}", SONG + f" Number {i}:", 24) for i in range(5)]
    texts = [running.ask(f"text {i + 1}", TEXT + f"Number {i}:", 24) for i in range(5)]
    await asyncio.gather(songs[0], texts[0])
    for pair in zip(songs[1:], texts[1:], strict=True):
        await asyncio.gather(*pair)


async def _failover(running: Running) -> None:
    streams = [asyncio.create_task(running.ask(f"request {i + 1}", TEXT[20 * i : 20 * i + 200], 150)) for i in range(4)]
    await running.ask("request 5", TEXT[100:], 40)
    running.workers[0].process.kill()
    await asyncio.gather(*streams)


async def _speculation(running: Running) -> None:
    await running.ask("request", "\n".join(["red, green, blue, yellow, black, white"] * 16) + "\n", 96)


POOL = "--num-gpu-blocks-override"
SCENES = {
    "blocks": Scene(_blocks, (POOL, "18")),
    "chunked_prefill": Scene(_chunked_prefill, ("--max-num-batched-tokens", "64", POOL, "64")),
    "copy_on_write": Scene(_copy_on_write, (POOL, "32")),
    "preemption": Scene(_preemption, (POOL, "25"), ("--preemption-mode", "recompute")),
    "swap": Scene(_preemption, (POOL, "25"), ("--preemption-mode", "swap")),
    "prefix_cache": Scene(_prefix_cache, (POOL, "48")),
    "placement": Scene(_placement, (POOL, "96"), num_workers=2),
    "failover": Scene(_failover, (POOL, "96"), num_workers=2),
    "speculation": Scene(_speculation, (POOL, "48", "--speculative-config", '{"method": "ngram"}')),
}


async def record(scene: Scene, path: Path) -> None:
    """Play one scene, and write its recording to `path`, which must not exist."""
    workers = [start("worker_service", *scene.worker, "--threads", "1") for _ in range(scene.num_workers)]
    processes = list(workers)
    try:
        addresses = [str(worker.wait_for("listening", START_SECONDS)["address"]) for worker in workers]
        for worker in workers:
            worker.wait_for("ready", START_SECONDS)
        options = (*ADMIN, *scene.scheduler, "--workers", ",".join(addresses), "--record", str(path))
        scheduler = start("scheduler_service", *options)
        processes.append(scheduler)
        target = str(scheduler.wait_for("listening", START_SECONDS)["address"])
        scheduler.wait_for("ready", START_SECONDS)
        async with Client(target) as client:
            await scene.play(Running(client, workers))
    finally:
        for process in reversed(processes):
            await asyncio.to_thread(process.stop)


def start(module: str, *options: str) -> ServiceProcess:
    return ServiceProcess(module, ["--listen", "127.0.0.1:0", *options])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pictures.record", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENES)}; the default is all")
    for name in parser.parse_args().names or SCENES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recording"
            asyncio.run(record(SCENES[name], path))
            (FOLDER / f"{name}.rec").write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
