"""A fleet for each test: its own scheduler, and workers that stay until a test kills them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet_helpers import Fleet, Scale, Serve
from load import SAMPLINGS, Outcome, Request, make_requests, run_once
from processes import Workers, scheduler
from tiny_model import write_byte_tokenizer, write_tiny_llama

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client
from pagewire_common.serving.open_files import raise_open_files_limit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", action="store_true", help="the long version of tests/fleet, with every number in full")


@pytest.fixture(scope="session", autouse=True)
def open_files() -> None:
    """The clients of a fleet, and their connections, are in this process."""
    raise_open_files_limit()


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
def workers(model: Path, scale: Scale) -> Iterator[Workers]:
    workers = Workers(model, step_seconds=0.0 if scale.is_full else 0.02)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def requests(scale: Scale) -> list[Request]:
    return make_requests(scale(16, 64), 1.0 if scale.is_full else 0.4)


@pytest.fixture(scope="session")
def expected(model: Path, workers: Workers, requests: list[Request]) -> dict[str, Outcome]:
    """The outcome of each request on an undisturbed worker."""
    (worker,) = workers.up(1)
    member = scheduler(model, [worker.address]).start()

    async def run() -> dict[str, Outcome]:
        async with Client(member.address) as client:
            await client.wait_until_serving(60)
            return await run_once(client, requests)

    try:
        outcomes = asyncio.run(run())
    finally:
        member.kill()
    has_ended = {
        request.sampling.WhichOneof("constraint")
        for request in requests
        if outcomes[request.prompt].outputs[0].ends == [pb.FINISH_REASON_STOP]
    }
    assert has_ended >= {"json_schema", "choice", "grammar"}, "only a whole text can be checked against its form"
    return outcomes


@pytest.fixture
async def serve(
    model: Path, scale: Scale, requests: list[Request], expected: dict[str, Outcome]
) -> AsyncIterator[Serve]:
    """Starts a scheduler with further arguments for the workers at these addresses; ready when it is awaited.

    Its client does not retry by default, so that no error goes unnoticed.
    """
    async with AsyncExitStack() as stack:

        async def serve(
            addresses: Sequence[str], *arguments: str, retry_for: float = 0.0, model: Path = model
        ) -> Fleet:
            member = scheduler(model, addresses, *arguments)
            stack.callback(member.kill)
            member.start()
            client = await stack.enter_async_context(Client(member.address, retry_for=retry_for))
            await client.wait_until_serving(60)
            return Fleet(member, client, requests, expected, scale(len(SAMPLINGS), 64))

        yield serve
