"""Requests that come together to a busy worker compute the prefix that they share once, and say what they say alone."""

import asyncio
from pathlib import Path

from embedding_helpers import assert_nothing_is_left
from engines import until
from scheduler_in_process import scheduler
from worker_in_process import worker_in_process

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import Completion, collect

PREFIX = "Everything that these requests say begins with the same words, and with the same blocks of them. " * 3
NUM_TOGETHER, BLOCK_SIZE = 6, 8


async def ask(client: Client, number: int) -> Completion:
    kinds = ({"temperature": 0}, {"temperature": 0.8, "seed": number}, {"n": 2, "temperature": 0.9, "seed": number})
    return await collect(
        client, f"{PREFIX}{number}", SamplingParams(max_tokens=6, ignore_eos=True, **kinds[number % 3])
    )


async def test_a_prefix_is_computed_once_and_changes_no_token(tiny_model_directory: Path) -> None:
    async with (
        worker_in_process(tiny_model_directory, num_gpu_blocks_override=200, block_size=BLOCK_SIZE) as worker,
        scheduler(
            worker.address, model=str(tiny_model_directory), check_invariants=True, max_num_batched_tokens=32
        ) as one,
        Client(one.target) as client,
    ):
        await until(lambda: one.engine.workers.admits)
        other = client.generate("Others run", SamplingParams(max_tokens=300, ignore_eos=True))
        await anext(other)
        together = await asyncio.gather(*(ask(client, number) for number in range(NUM_TOGETHER)))
        await other.aclose()
        num_computed = [completion.prompt_tokens - completion.cached_tokens for completion in together]
        assert sorted(num_computed)[-2] <= 2 * BLOCK_SIZE < together[0].prompt_tokens == max(num_computed)
        for number, completion in enumerate(together):
            alone = await ask(client, number)
            assert [output.token_ids for output in alone.outputs] == [output.token_ids for output in completion.outputs]
        await assert_nothing_is_left(one)
