"""An engine and a front end in this process, joined by their real wire, and their clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from pagewire_common.processes.temporary import TemporaryFolder
from scheduler_service.access.keys import Keyring
from scheduler_service.core import SequenceGroup
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.front_ends.servicer import FrontEnds
from scheduler_service.engine.sessions.discovery import resolve_by_dns
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.operations.admin_servicer import AdminServicer
from scheduler_service.server import engine_server
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.sampling import RequestSampling


class OneProcess:
    """The front end, with all other attributes of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.front_ends = FrontEnds(engine, 1)
        self.admin = AdminServicer(self.front_ends)
        self.link: EngineLink
        self.target = ""  # of the engine, for front ends
        self._calls: dict[RequestState, EngineCall] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def model(self) -> ServedModel:
        return await self.link.model()

    async def submit(self, request: GenerationRequest, num_bytes: int = 0) -> RequestState:
        """Admit and queue a request; `close` it in the end."""
        call = EngineCall(self.link)
        try:
            await call.admit(request.key, num_bytes, resumes=request.resumes)
            state = await call.submit(request, await self.model())
        except BaseException:
            call.__exit__()
            raise
        self._calls[state] = call
        return state

    def group(self, state: RequestState) -> SequenceGroup:
        """The request's group, while it is in flight."""
        group = self.engine.requests.in_flight[state.request.key].group
        assert group is not None
        return group

    async def close(self, state: RequestState) -> None:
        """Close the request; returns when the engine knows."""
        state.stream.leave()
        self._calls.pop(state).__exit__()
        await until(lambda: all(state.call not in connection._calls for connection in self.front_ends.connections))


@asynccontextmanager
async def running(
    *workers: str,
    resolve: Any = resolve_by_dns,
    time_limit: float = 60,
    keyring: Keyring | None = None,
    **settings: object,
) -> AsyncIterator[OneProcess]:
    options = {"workers": list(workers), "model": "fake", "check_invariants": True, **settings}
    engine = Engine(SchedulerSettings(**options), resolve, keyring)  # type: ignore[arg-type]
    one = OneProcess(engine)
    with TemporaryFolder("engine") as folder:
        one.target = f"unix:{folder / 'engine'}"
        async with asyncio.timeout(time_limit), engine_server(one.front_ends, one.target):
            one.link = EngineLink(one.target)
            tasks = [asyncio.create_task(engine.run()), asyncio.create_task(one.link.run())]
            try:
                await one.link.welcome
                yield one
            finally:
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                await one.link.connection.close()


async def submit(one: OneProcess, name: str, prompt: list[int], **sampling: Any) -> RequestState:
    """Greedy, five tokens, unless told otherwise."""
    parameters = RequestSampling(**{"max_tokens": 5, **sampling})
    return await one.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=parameters))


async def text_of(one: OneProcess, state: RequestState) -> str:
    try:
        return "".join([delta.text async for delta in state.stream])
    finally:
        await one.close(state)


async def until(condition: Callable[[], object]) -> None:
    """Let all other tasks run until the condition holds. The caller sets a time limit."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)
