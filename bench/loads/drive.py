"""Sends a load to a system, pagewire or a peer, and records when the output tokens arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from bench.loads.figures import Run, Timeline
from bench.loads.load import Load
from scheduler_service.simulation.trace import Arrival

Stream = Callable[[Sequence[int], int], AsyncIterator[int]]
"""Requests tokens after a prompt, greedy and beyond end-of-sequence tokens. Yields each message's number of tokens."""


class BenchError(Exception):
    """The measurement is impossible or invalid, for the reason in the message."""


class System(Protocol):
    """A running server: pagewire or a peer."""

    name: str
    start_seconds: float

    def pids(self) -> Sequence[int]:
        """The processes that the benchmark started, without their children."""

    def connect(self) -> AbstractAsyncContextManager[Stream]: ...


async def drive(system: System, load: Load, prompts: Sequence[Sequence[int]]) -> Run:
    """Send a load once. Raises BenchError if the system answers with more or fewer tokens than requested."""
    slots = asyncio.Semaphore(load.concurrency)
    async with system.connect() as stream:
        start = time.perf_counter()

        async def one(arrival: Arrival, prompt: Sequence[int]) -> Timeline:
            if arrival.at:
                await asyncio.sleep(start + arrival.at - time.perf_counter())
            async with slots:
                began = time.perf_counter()
                messages = [(time.perf_counter(), tokens) async for tokens in stream(prompt, arrival.output_tokens)]
            timeline = Timeline(began, len(prompt), messages)
            if timeline.output_tokens != arrival.output_tokens:
                raise BenchError(
                    f"{system.name} sent {timeline.output_tokens} tokens where {arrival.output_tokens} were asked for"
                )
            return timeline

        timelines = await asyncio.gather(*map(one, load.arrivals, prompts))
        return Run(time.perf_counter() - start, timelines)
