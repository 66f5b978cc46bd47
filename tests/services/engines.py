"""An engine in this process, and what its clients do with it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from scheduler_service.core import SamplingParams
from scheduler_service.discovery import resolve_by_dns
from scheduler_service.engine import Engine
from scheduler_service.request import GenerationRequest, RequestState
from scheduler_service.settings import SchedulerSettings


@asynccontextmanager
async def running(
    *workers: str, resolve: Any = resolve_by_dns, time_limit: float = 60, **settings: object
) -> AsyncIterator[Engine]:
    options = {"workers": list(workers), "model": "fake", "check_invariants": True, **settings}
    engine = Engine(SchedulerSettings(**options), resolve)  # type: ignore[arg-type]
    task = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(time_limit):
            yield engine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def submit(engine: Engine, name: str, prompt: list[int], **sampling: Any) -> RequestState:
    """Greedy, five tokens, unless told otherwise."""
    parameters = SamplingParams(**{"max_tokens": 5, **sampling})
    with engine.admission(name):
        model = await engine.model()
        return engine.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=parameters), model)


async def text_of(engine: Engine, state: RequestState) -> str:
    try:
        return "".join([delta.text async for delta in state.stream])
    finally:
        engine.close(state)


async def until(condition: Callable[[], object]) -> None:
    """Let all other tasks run until the condition holds. The caller sets a time limit."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)
