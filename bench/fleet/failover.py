"""Measures how long the streams of a killed worker pause: from SIGKILL to each stream's next token.

Two workers serve the default model with one thread each. While the streams begin, one worker is drained, so that all
run on the other and the drained one is free when the other is killed. The time to compute the lost tokens is measured
separately, as the time to first token of as many new prompts of the same lengths.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

from bench.fleet.fleet import Fleet
from pagewire_client import Client, SamplingParams

NUM_STREAMS = 8
PROMPT_TOKENS = 128
TOKENS_BEFORE_KILL = 32
NUM_KILLS = 6
ON_ITS_WAY_SECONDS = 0.1
WAIT_SECONDS = 120
WORKER_ARGUMENTS = ("--threads", "1", "--kv-cache-memory", "0.5", "--max-model-len", "2048")


@dataclass(slots=True)
class Failover:
    """Milliseconds, for each stream and each kill."""

    pauses: list[float] = field(default_factory=list)
    """Time from SIGKILL to the stream's next token."""
    recomputes: list[float] = field(default_factory=list)
    """Time to first token of a new prompt of the stream's length."""

    def as_json(self) -> dict[str, float]:
        return {
            "kill_to_next_token_ms_median": statistics.median(self.pauses),
            "kill_to_next_token_ms_worst": max(self.pauses),
            "recompute_ms_median": statistics.median(self.recomputes),
            "recompute_ms_worst": max(self.recomputes),
        }


async def measure(fleet: Fleet, vocabulary_size: int, tell: Callable[[str], None]) -> Failover:
    """Kill both workers in turn, several times."""
    failover, draw = Failover(), Random(0)
    addresses = list(fleet.workers)
    for number in range(NUM_KILLS):
        victim, other = addresses[number % 2], addresses[1 - number % 2]
        await fleet.give_nothing_to(other)
        pauses, recomputes = await _kill(fleet, victim, other, vocabulary_size, draw)
        tell(f"kill {number + 1}: the next token after {statistics.median(pauses):.0f} ms, {max(pauses):.0f} at worst")
        failover.pauses += pauses
        failover.recomputes += recomputes
        await asyncio.to_thread(fleet.restart, victim)
    return failover


async def _kill(
    fleet: Fleet, victim: str, other: str, vocabulary_size: int, draw: Random
) -> tuple[list[float], list[float]]:
    came: list[list[float]] = [[] for _ in range(NUM_STREAMS)]  # arrival times of each stream's tokens
    progress = asyncio.Event()

    async def read(client: Client, times: list[float], num_prompt_tokens: int) -> None:
        prompt = [draw.randrange(vocabulary_size) for _ in range(num_prompt_tokens)]
        sampling = SamplingParams(max_tokens=1024, temperature=0, ignore_eos=True)
        async for message in client.generate(prompt, sampling):
            times += [time.perf_counter()] * len(message.token_ids)
            progress.set()

    async def until(is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not is_reached():
                progress.clear()
                await progress.wait()

    async with Client(fleet.target) as client:
        streams = [asyncio.create_task(read(client, times, PROMPT_TOKENS)) for times in came]
        await until(lambda: all(len(times) >= TOKENS_BEFORE_KILL for times in came))
        await fleet.give_again_to(other)
        fleet.kill(victim)
        killed = time.perf_counter()
        await until(lambda: all(times[-1] > killed + ON_ITS_WAY_SECONDS for times in came))
        pauses = [1e3 * (_end_of_pause(killed, times) - killed) for times in came]
        num_tokens = [PROMPT_TOKENS + sum(at <= killed for at in times) for times in came]
        await _cancel(streams)
        afresh: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        sent = time.perf_counter()
        streams = [
            asyncio.create_task(read(client, times, number)) for times, number in zip(afresh, num_tokens, strict=True)
        ]
        await until(lambda: all(afresh))
        await _cancel(streams)
    return pauses, [1e3 * (times[0] - sent) for times in afresh]


def _end_of_pause(killed: float, times: Sequence[float]) -> float:
    """The end of the longest pause around the kill. Tokens that were sent before the kill may arrive after it."""
    pauses = [(after - before, after) for before, after in pairwise(times) if before < killed + ON_ITS_WAY_SECONDS]
    return max(pause for pause in pauses if pause[1] > killed)[1]


async def _cancel(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(model: Path, vocabulary_size: int, tell: Callable[[str], None]) -> Failover:
    with Fleet(model, 2, WORKER_ARGUMENTS) as fleet:
        return asyncio.run(measure(fleet, vocabulary_size, tell))
