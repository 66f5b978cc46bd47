"""Keys of the prefix cache are the same, whether made before a request is queued or by the scheduler."""

from pathlib import Path

import pytest
from engines import running
from fake_worker_service import FakeWorkerService, serving

from scheduler_service import engine as engine_module
from scheduler_service.core import SamplingParams
from scheduler_service.request import GenerationRequest, Resumption


@pytest.mark.parametrize("output", [(), ((73,) * 30,)])
async def test_keys_made_in_many_turns_are_those_that_planning_makes(
    output: tuple[tuple[int, ...], ...], byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "KEYS_AT_ONCE", 2)
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
        model = await engine.model()
        keys = await engine.block_keys(request, model)
        assert len(keys) == (200 + sum(map(len, output))) // 8
        state = engine.submit(request, model)  # without them, so that they are made when they are needed
        async for _ in state.stream:
            pass
        assert state.group.sequences[0].block_keys[: len(keys)] == keys
        engine.close(state)
