"""An asyncio client that keeps a fixed number of streams open and notes when every token came."""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass

from pagewire_client import Client, SamplingParams


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` streams at once; each has a random prompt and an output of exactly these many tokens."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    @property
    def num_requests(self) -> int:
        return max(4, 2 * self.concurrency)

    def __str__(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens} x {self.concurrency}"

    def prompts(self, vocabulary_size: int, *, seed: int = 0) -> list[list[int]]:
        draw = random.Random(f"{self} {seed}")  # no two loads share a prompt that the prefix cache could know
        return [[draw.randrange(vocabulary_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]


@dataclass(frozen=True, slots=True)
class Figures:
    """Throughput in tokens a second; median time to the first token and for each further one, in milliseconds."""

    output_tokens_per_second: float
    ttft_ms: float
    tpot_ms: float


async def drive(target: str, load: Load) -> Figures:
    """Put a load on a server, once to warm it up and once to measure it."""
    sampling = SamplingParams(max_tokens=load.output_tokens, temperature=0, ignore_eos=True)
    first_after: list[float] = []
    each_after: list[float] = []
    slots = asyncio.Semaphore(load.concurrency)
    async with Client(target) as client:

        async def one(prompt: list[int]) -> None:
            async with slots:
                began = time.perf_counter()
                times = [time.perf_counter() async for m in client.generate(prompt, sampling) for _ in m.token_ids]
            assert len(times) == load.output_tokens
            first_after.append(times[0] - began)
            each_after.append((times[-1] - times[0]) / (len(times) - 1))

        vocabulary_size = (await client.get_model()).vocabulary_size
        prompts = load.prompts(vocabulary_size)
        # Warm up on others, or the prefix cache would know what is to be measured.
        await asyncio.gather(*map(one, load.prompts(vocabulary_size, seed=1)[: load.concurrency]))
        first_after.clear()
        each_after.clear()
        began = time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - began
    return Figures(
        load.num_requests * load.output_tokens / seconds,
        1e3 * statistics.median(first_after),
        1e3 * statistics.median(each_after),
    )
