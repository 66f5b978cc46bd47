"""Measures how streams are slowed by calls whose answers are never read, and by idle connections.

One worker serves the default model to eight measured streams and eight extra calls of another client. This client reads
its answers in one run. In the other it never does, and a thousand idle connections are open.
"""

import asyncio
import socket
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.fleet.fleet import Fleet
from bench.fleet.http2 import WIDEST, Connection
from bench.fleet.overhead import WORKER_ARGUMENTS, Targets
from bench.fleet.raw_load import PATH
from bench.loads.drive import drive
from bench.loads.figures import Run, median_interval, rate
from bench.loads.load import streams
from pagewire.v1 import inference_service_pb2 as pb

NUM_SILENT_CONNECTIONS = 1000
NUM_UNREAD_CALLS = 8
UNREAD_TOKENS = 1500
NUM_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Bystanders:
    """Output tokens per second of the measured streams, and the slowdown. The interval is of 95% confidence."""

    alone: float
    """The extra calls are read."""
    beside: float
    """The extra calls are not read, and the idle connections are open."""
    slowed_percent: float
    """Median over pairs of runs."""
    at_least_percent: float
    at_most_percent: float


@asynccontextmanager
async def extra_calls(target: str, window: int) -> AsyncIterator[None]:
    """Keep the extra calls, which have long outputs, running until the `with` block ends."""
    host, _, port = target.rpartition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(PATH, lambda *_: None, lambda _: None, window), host, int(port)
    )
    for number in range(NUM_UNREAD_CALLS):
        sampling = pb.SamplingParams(max_tokens=UNREAD_TOKENS, temperature=0.0, ignore_eos=True)
        prompt = pb.TokenIds(ids=range(1000 + 100 * number, 1064 + 100 * number))
        connection.begin(pb.GenerateRequest(token_ids=prompt, sampling=sampling).SerializeToString())
    try:
        yield
    finally:
        transport.abort()


def run(model: Path, vocabulary_size: int, tell: Callable[[str], None]) -> Bystanders:
    load = streams(128, 128, 8, 24)
    runs: dict[str, list[Run]] = {"alone": [], "beside": []}
    with Fleet(model, 1, WORKER_ARGUMENTS) as fleet:
        system = Targets("pagewire", [fleet])
        host, _, port = fleet.target.rpartition(":")

        async def measure() -> None:
            for number in range(NUM_ROUNDS + 1):
                for name in ("alone", "beside") if number % 2 else ("beside", "alone"):
                    with ExitStack() as stack:
                        if name == "beside":
                            for _ in range(NUM_SILENT_CONNECTIONS):
                                stack.enter_context(socket.create_connection((host, int(port))))
                        async with extra_calls(fleet.target, 0 if name == "beside" else WIDEST):
                            # new prompts, so that none is in the prefix cache
                            prompts = load.prompts(vocabulary_size, f"{number} {name}")
                            run = await drive(system, load, prompts)
                    if number:  # the first run of each kind is a warm-up
                        runs[name].append(run)
                        tell(f"{name}: {rate([run]):.0f} output tok/s")

        asyncio.run(measure())
    slowed = [
        100 * (1 - rate([beside]) / rate([alone])) for alone, beside in zip(runs["alone"], runs["beside"], strict=True)
    ]
    return Bystanders(rate(runs["alone"]), rate(runs["beside"]), statistics.median(slowed), *median_interval(slowed))
