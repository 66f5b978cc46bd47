"""Keys of the prefix cache are the same, whether made before a request is queued or by the scheduler."""

from pathlib import Path
from typing import Any

import pytest
from engines import running, submit, text_of
from fake_worker_service import FakeWorkerService, serving

from scheduler_service.core import SamplingParams
from scheduler_service.frontend.link import engine_call
from scheduler_service.frontend.output.request import GenerationRequest, Resumption
from scheduler_service.wire.messages import KEY_BYTES


@pytest.mark.parametrize("output", [(), ((73,) * 30,)])
async def test_keys_made_in_many_turns_are_those_that_planning_makes(
    output: tuple[tuple[int, ...], ...], byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_call, "KEYS_AT_ONCE", 2)
    request = GenerationRequest(
        request_id="a",
        prompt_token_ids=list(range(3, 203)),
        sampling=SamplingParams(max_tokens=40),
        tenant="gold",
        cache_salt="salt",
        resumption=Resumption(token_ids=output),
    )
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        sent: list[bytes] = []

        async def keep(*arguments: Any) -> bytes:
            """Keep the keys from the engine, so that they are made when they are needed."""
            sent.append(await make(*arguments))
            return b""

        make = engine_call._block_keys
        monkeypatch.setattr(engine_call, "_block_keys", keep)
        state = await engine.submit(request)
        (sequence,) = engine.group(state).sequences
        async for _ in state.stream:
            pass
        keys = [sent[0][at : at + KEY_BYTES] for at in range(0, len(sent[0]), KEY_BYTES)]
        assert len(keys) == (200 + sum(map(len, output))) // 8
        assert sequence.block_keys[: len(keys)] == keys
        await engine.close(state)


async def test_keys_that_the_front_end_made_are_the_ones_that_planning_has(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.runs.clear()
    async with serving(worker) as address, running(address) as engine:
        state = await submit(engine, "a", list(range(3, 203)))
        root = engine.group(state).cache_root
        keys = await engine_call._block_keys(root, state.request.prompt_token_ids, 8)
        assert b"".join(engine.group(state).sequences[0].block_keys) == keys
        assert len(keys) == 200 // 8 * KEY_BYTES
        worker.runs.set()
        assert await text_of(engine, state) == "ggggg"
