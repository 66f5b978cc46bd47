"""Workers over real gRPC share what comes, and the one that has computed a prompt before gets it again."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving

from scheduler_service.core import PlacementReason


async def test_a_burst_is_shared_among_workers_that_compute_nothing_yet(byte_tokenizer_directory: Path) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory) for _ in range(3)]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(worker)) for worker in workers]
        engine = await stack.enter_async_context(running(*addresses))
        await until(lambda: len(engine.workers.serving) == 3)
        states = await asyncio.gather(
            *(submit(engine, str(number), [number] * 20, max_tokens=20) for number in range(12))
        )
        await until(lambda: not engine.requests.waiting)
        assert await asyncio.gather(*(text_of(engine, state) for state in states)) == ["g" * 20] * 12
    assert [worker.num_prompts for worker in workers] == [4, 4, 4]


async def test_turns_of_a_conversation_go_to_the_worker_that_has_them_cached(byte_tokenizer_directory: Path) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory) for _ in range(3)]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(worker)) for worker in workers]
        engine = await stack.enter_async_context(running(*addresses))
        await until(lambda: len(engine.workers.serving) == 3)
        balancer = engine.requests.waiting.balancer
        balancer.stepped = lambda *_: None  # type: ignore[method-assign]  # how fast fakes are is noise
        prompts = [[number] * 40 for number in range(3)]
        cached: list[int | None] = []
        for turn in range(4):
            for number, prompt in enumerate(prompts):
                state = await submit(engine, f"{turn}.{number}", prompt, max_tokens=8)
                group = engine.group(state)
                (sequence,) = group.sequences
                assert await text_of(engine, state) == "g" * 8
                cached.append(group.history.num_cached_tokens)
                prompt += sequence.token_ids[len(prompt) :] + [number] * 8
    assert cached[:3] == [0, 0, 0]
    assert all(tokens is not None and tokens >= 40 for tokens in cached[3:])
    assert balancer.num_placed[PlacementReason.AFFINITY] == 9
