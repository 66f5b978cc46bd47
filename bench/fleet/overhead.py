"""Measures the overhead of a fleet: one scheduler for all workers, compared with one scheduler for each.

Both systems compute the same streams with equal workers (the default model, one thread) on the same cores. The
difference is the work of a fleet's scheduler: a shared queue, placement, and several sessions in one event loop. They
run alternately, so that drift of the machine affects both. The schedulers' CPU time per token shows the overhead even
if the output rates vary more.
"""

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.fleet.fleet import Fleet
from bench.loads.drive import Stream, drive
from bench.loads.figures import Run, median_interval, rate
from bench.loads.load import Load, streams
from bench.measurements.measure import PAUSE_SECONDS
from bench.systems.processes import cpu_seconds
from pagewire_client import Client, SamplingParams

WORKER_ARGUMENTS = ("--threads", "1", "--kv-cache-memory", "0.25", "--max-model-len", "2048")
STREAMS_A_WORKER = 8
NUM_ROUNDS = 12


class Targets:
    """One of the two systems. Streams are distributed over its schedulers in turn."""

    def __init__(self, name: str, fleets: Sequence[Fleet]) -> None:
        self.name = name
        self.start_seconds = 0.0
        self.runs: list[Run] = []
        self.scheduler_seconds = 0.0
        """CPU seconds of all schedulers during the runs."""
        self._fleets = fleets

    def pids(self) -> list[int]:
        return [pid for fleet in self._fleets for pid in fleet.pids()]

    async def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> float:
        """Output tokens per second of a load. The schedulers' CPU time is added to `scheduler_seconds`."""
        pids = [fleet.scheduler_pid for fleet in self._fleets]
        before = cpu_seconds(pids)
        self.runs.append(await drive(self, load, prompts))
        self.scheduler_seconds += cpu_seconds(pids) - before
        return rate(self.runs[-1:])

    def scheduler_us_per_token(self) -> float:
        return 1e6 * self.scheduler_seconds / sum(line.output_tokens for run in self.runs for line in run.timelines)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(fleet.target)) for fleet in self._fleets]
            for client in clients:
                await client.get_model()  # opens the gRPC connection before the measurement
            turns = itertools.cycle(clients)

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
                async for message in next(turns).generate(prompt, sampling):
                    if message.token_ids:
                        yield len(message.token_ids)

            yield stream


@dataclass(frozen=True, slots=True)
class Overhead:
    """Output tokens per second, with a scheduler for each worker (apart) and one for all (together)."""

    num_workers: int
    apart: float
    together: float
    overhead_percent: float
    """Median over pairs of runs, with its 95% confidence interval."""
    at_least_percent: float
    at_most_percent: float
    scheduler_us_per_token_apart: float
    scheduler_us_per_token_together: float


def run(model: Path, vocabulary_size: int, num_workers: int, tell: Callable[[str], None]) -> Overhead:
    load = streams(128, 128, num_workers * STREAMS_A_WORKER, 2 * num_workers * STREAMS_A_WORKER)
    with ExitStack() as stack:
        together = Targets("together", [stack.enter_context(Fleet(model, num_workers, WORKER_ARGUMENTS))])
        pairs = [stack.enter_context(Fleet(model, 1, WORKER_ARGUMENTS)) for _ in range(num_workers)]
        apart = Targets("apart", pairs)
        overheads: list[float] = []

        async def measure() -> None:
            for system in (together, apart):
                await drive(system, load, load.prompts(vocabulary_size, "warm-up"))
            for number in range(NUM_ROUNDS):
                prompts = load.prompts(vocabulary_size, number)
                rates: dict[Targets, float] = {}
                for system in (together, apart) if number % 2 else (apart, together):
                    await asyncio.sleep(PAUSE_SECONDS)
                    rates[system] = await system.run(load, prompts)
                overheads.append(100 * (1 - rates[together] / rates[apart]))
                tell(f"{num_workers} workers: {rates[together]:.0f} tok/s together, {rates[apart]:.0f} apart")

        asyncio.run(measure())
    return Overhead(
        num_workers,
        rate(apart.runs),
        rate(together.runs),
        statistics.median(overheads),
        *median_interval(overheads),
        apart.scheduler_us_per_token(),
        together.scheduler_us_per_token(),
    )
