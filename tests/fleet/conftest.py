"""A fleet for each test: workers that stay from test to test unless one killed them, and a scheduler of its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import ClusterState, cluster_state, holds_blocks, until_idle
from load import Load, Outcome, Request, make_requests, run_once
from processes import Member, Workers, scheduler
from tiny_model import write_byte_tokenizer, write_tiny_llama

from pagewire_client import Client


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", action="store_true", help="the long version of tests/fleet, with every number in full")


@dataclass(frozen=True)
class Scale:
    """How much of everything: a little for every day, or all of it with --chaos."""

    is_full: bool

    def __call__(self, little: int, full: int) -> int:
        return full if self.is_full else little


@dataclass
class Fleet:
    """A scheduler that serves, and a client of it."""

    scheduler: Member
    client: Client
    requests: Sequence[Request]
    expected: dict[str, Outcome]

    def load(self, count: int | None = None) -> Load:
        """Streams of the first `count` requests, or of all."""
        return Load(self.client, self.requests[:count], self.expected)

    async def state(self) -> ClusterState:
        return await cluster_state(self.scheduler.address)

    async def until(self, is_reached: Callable[[ClusterState], bool], timeout: float = 60.0) -> ClusterState:
        """The first state of the cluster in which `is_reached`."""
        async with asyncio.timeout(timeout):
            while True:
                if is_reached(state := await self.state()):
                    return state
                await asyncio.sleep(0.01)

    async def check_empty(self) -> ClusterState:
        """Once nothing waits or runs, no block is held on any worker."""
        state = await until_idle(self.scheduler.address)
        assert not any(map(holds_blocks, state.workers)), state
        return state


Serve = Callable[..., Awaitable[Fleet]]


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> Scale:
    return Scale(bool(pytestconfig.getoption("--chaos", default=False)))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fleet")
    write_byte_tokenizer(directory / "tokenizer")
    write_tiny_llama(directory / "tiny-llama", directory / "tokenizer")
    return directory / "tiny-llama"


@pytest.fixture(scope="session")
def workers(model: Path) -> Iterator[Workers]:
    workers = Workers(model)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def requests(scale: Scale) -> list[Request]:
    return make_requests(scale(16, 64), 1.0 if scale.is_full else 0.4)


@pytest.fixture(scope="session")
def expected(model: Path, workers: Workers, requests: list[Request]) -> dict[str, Outcome]:
    """What each request gives where nothing happens."""
    (worker,) = workers.up(1)
    member = scheduler(model, [worker.address]).start()

    async def run() -> dict[str, Outcome]:
        async with Client(member.address) as client:
            await client.wait_until_serving(60)
            return await run_once(client, requests)

    try:
        return asyncio.run(run())
    finally:
        member.kill()


@pytest.fixture
async def serve(model: Path, requests: list[Request], expected: dict[str, Outcome]) -> AsyncIterator[Serve]:
    """Starts a scheduler with further arguments for the workers at these addresses; ready when it is awaited.

    Its client tries nothing again, unless it is told to, so that no error of the server goes unnoticed.
    """
    async with AsyncExitStack() as stack:

        async def serve(addresses: Sequence[str], *arguments: str, retry_for: float = 0.0) -> Fleet:
            member = scheduler(model, addresses, *arguments)
            stack.callback(member.kill)
            member.start()
            client = await stack.enter_async_context(Client(member.address, retry_for=retry_for))
            await client.wait_until_serving(60)
            return Fleet(member, client, requests, expected)

        yield serve
