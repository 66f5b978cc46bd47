"""Measures the overhead of a fleet: one scheduler with several workers is compared with one scheduler for each worker.

Both systems compute the same streams with equal workers on the same cores. The difference between the two systems is
the work that only a fleet's scheduler has: a shared queue, placement, and several sessions in one event loop. The
workers serve the default model with one thread each.

Both systems stay started and are measured alternately, so that a drift of the machine's speed affects both systems.
Each pair of runs gives a ratio of two output rates. The schedulers' CPU time per token is also reported, because it
shows the overhead even if the output rates vary more than the overhead.
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
    """One of the two compared systems: one or several schedulers. Streams are distributed over the schedulers in
    turn.
    """

    def __init__(self, name: str, fleets: Sequence[Fleet]) -> None:
        self.name = name
        self.start_seconds = 0.0
        self.runs: list[Run] = []
        self.scheduler_seconds = 0.0
        """CPU time in seconds of all schedulers during the runs."""
        self._fleets = fleets

    def pids(self) -> list[int]:
        return [pid for fleet in self._fleets for pid in fleet.pids()]

    async def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> float:
        """Run a load, and add the CPU time of the schedulers to `scheduler_seconds`. Returns output tokens per
        second.
        """
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
    """Output rates of the two compared systems: a scheduler for each worker, and one scheduler for all workers."""

    num_workers: int
    apart: float
    """Output tokens per second with a scheduler for each worker."""
    together: float
    overhead_percent: float
    """Median overhead of one scheduler for all workers in percent, over pairs of runs."""
    at_least_percent: float
    """Lower end of the 95% confidence interval of the median overhead, in percent."""
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
