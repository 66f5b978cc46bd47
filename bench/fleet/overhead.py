"""What a fleet costs: one scheduler with several workers beside as many pairs of a scheduler and a worker.

Both compute the same streams with the same workers on the same cores; the difference is the fleet's own: one queue for
all, placement, several sessions in one event loop. Workers of the default model have a thread each. Both systems are up
at once and run in turn, so that the machine's drift comes to both.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.drive import Stream, drive
from bench.figures import Run, rate
from bench.fleet.fleet import Fleet
from bench.load import streams
from bench.measure import PAUSE_SECONDS
from pagewire_client import Client, SamplingParams

WORKER_ARGUMENTS = ("--threads", "1", "--kv-cache-memory", "0.25", "--max-model-len", "2048")
STREAMS_A_WORKER = 8
NUM_ROUNDS = 3


class Targets:
    """One or several schedulers, to which streams go in turn."""

    def __init__(self, name: str, fleets: Sequence[Fleet]) -> None:
        self.name = name
        self.start_seconds = 0.0
        self._fleets = fleets

    def pids(self) -> list[int]:
        return [pid for fleet in self._fleets for pid in fleet.pids()]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(fleet.target)) for fleet in self._fleets]
            for client in clients:
                await client.get_model()  # the connection is made before anything is measured
            turns = itertools.cycle(clients)

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
                async for message in next(turns).generate(prompt, sampling):
                    if message.token_ids:
                        yield len(message.token_ids)

            yield stream


@dataclass(frozen=True, slots=True)
class Overhead:
    """Output tokens a second of so many workers."""

    num_workers: int
    apart: float
    """Each with a scheduler of its own."""
    together: float
    """All with one."""

    def as_json(self) -> dict[str, float]:
        return {**asdict(self), "overhead_percent": 100 * (1 - self.together / self.apart)}


def run(model: Path, vocabulary_size: int, num_workers: int, tell: Callable[[str], None]) -> Overhead:
    load = streams(128, 128, num_workers * STREAMS_A_WORKER, 2 * num_workers * STREAMS_A_WORKER)
    with ExitStack() as stack:
        together = Targets("together", [stack.enter_context(Fleet(model, num_workers, WORKER_ARGUMENTS))])
        pairs = [stack.enter_context(Fleet(model, 1, WORKER_ARGUMENTS)) for _ in range(num_workers)]
        apart = Targets("apart", pairs)
        runs: dict[str, list[Run]] = {"together": [], "apart": []}

        async def measure() -> None:
            for number in range(NUM_ROUNDS + 1):
                prompts = load.prompts(vocabulary_size, number)
                for system in (together, apart) if number % 2 else (apart, together):
                    await asyncio.sleep(PAUSE_SECONDS)
                    run = await drive(system, load, prompts)
                    if number:  # the first one warms up
                        runs[system.name].append(run)
                        tell(f"{num_workers} workers {system.name}: {rate([run]):.0f} output tok/s")

        asyncio.run(measure())
    return Overhead(num_workers, apart=rate(runs["apart"]), together=rate(runs["together"]))
