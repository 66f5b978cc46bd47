"""An engine in this process and real workers beside it, with signals: what they compute is what it would have been."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import OneProcess, running, submit, text_of, until
from test_processes import WORKER_SIZES, Start
from test_processes import start as start

from pagewire_client.local import ServiceProcess
from scheduler_service.engine.workers import Worker, WorkerStatus
from scheduler_service.frontend.output.request_state import RequestState

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "several": {"temperature": 1.0, "seed": 6, "n": 3},
    "beams": {"beam_width": 3, "n": 2},
    "probabilities": {"logprobs": 2, "prompt_logprobs": 0},
}


class Workers:
    """Worker processes of one model, and engines that use them."""

    def __init__(self, start: Start, model: Path) -> None:
        self._start = start
        self._model = model
        self._processes: dict[str, ServiceProcess] = {}

    def up(self, address: str = "127.0.0.1:0", *arguments: str) -> str:
        options = ("--model", str(self._model), *WORKER_SIZES, *arguments)
        process, address = self._start("worker_service", *options, listen=address)
        self._processes[address] = process
        return address

    def signal(self, address: str, number: int) -> None:
        self._processes[address].process.send_signal(number)

    async def ended(self, address: str) -> int:
        return await asyncio.to_thread(self._processes[address].process.wait, 60)

    @asynccontextmanager
    async def engine(self, *addresses: str, **settings: object) -> AsyncIterator[OneProcess]:
        async with running(*addresses, model=str(self._model), **settings) as engine:
            await until(lambda: all(loop.admits for loop in engine.workers.all))
            yield engine


@pytest.fixture
def workers(start: Start, tiny_model_directory: Path) -> Workers:
    return Workers(start, tiny_model_directory)


def loop_of(engine: OneProcess, address: str) -> Worker:
    return next(loop for loop in engine.workers.all if loop.client.address == address)


async def tokens_of(engine: OneProcess, state: RequestState) -> Any:
    """Token ids and log-probabilities of each output."""
    outputs: dict[int, tuple[list[int], list[float], list[float]]] = {}
    try:
        async for delta in state.stream:
            tokens, logprobs, prompt = outputs.setdefault(delta.index, ([], [], []))
            tokens += delta.token_ids
            logprobs += [entry.logprobs[0] for entry in delta.logprobs]
            prompt += [entry.logprobs[0] for entry in delta.prompt_logprobs]
    finally:
        await engine.close(state)
    return outputs


async def load(engine: OneProcess) -> dict[str, asyncio.Task[Any]]:
    """A request of every kind."""
    return {
        name: asyncio.create_task(
            tokens_of(engine, await submit(engine, name, [*range(3, 40)], max_tokens=60, **sampling))
        )
        for name, sampling in SAMPLINGS.items()
    }


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for index, (tokens, logprobs, prompt) in expected.items():
        assert found[index][0] == tokens
        assert found[index][1] == pytest.approx(logprobs, abs=1e-3)
        assert found[index][2] == pytest.approx(prompt, abs=1e-3)


async def check(streams: dict[str, asyncio.Task[Any]], expected: dict[str, Any]) -> None:
    for name, stream in streams.items():
        assert_equal(await stream, expected[name])


async def gain(engine: OneProcess, loop: Worker) -> None:
    """Until a worker has answered steps that it runs groups in, and has some left."""
    steps = loop.num_steps
    await until(lambda: loop.num_steps > steps + 5 and loop.scheduler is not None and loop.scheduler.running)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
async def test_requests_of_every_kind_go_on_elsewhere_from_their_tokens(number: int, workers: Workers) -> None:
    first, second = workers.up(), workers.up()
    options = {"health_interval": 0.2, "max_num_seqs": 8}
    async with workers.engine(first, second, **options) as engine:
        expected = {name: await stream for name, stream in (await load(engine)).items()}
        streams = await load(engine)
        victim = loop_of(engine, first)
        await gain(engine, victim)
        workers.signal(first, number)
        await check(streams, expected)
        assert not engine.requests.in_flight
        if number == signal.SIGTERM:
            assert await workers.ended(first) == 0
        assert victim.num_losses == (number != signal.SIGTERM)
        survivor = loop_of(engine, second).scheduler
        assert survivor is not None
        assert survivor.blocks.device.num_free == 64
        if number == signal.SIGSTOP:
            workers.signal(first, signal.SIGCONT)
            await until(lambda: victim.admits)


async def test_what_outlasts_a_workers_grace_goes_on_elsewhere(workers: Workers) -> None:
    first, second = workers.up("127.0.0.1:0", "--grace", "0"), workers.up()
    async with workers.engine(first, second, max_num_seqs=8) as engine:
        expected = {name: await stream for name, stream in (await load(engine)).items()}
        streams = await load(engine)
        victim = loop_of(engine, first)
        await gain(engine, victim)
        workers.signal(first, signal.SIGTERM)
        await check(streams, expected)
        assert await workers.ended(first) == 0
        assert victim.num_losses == 0


async def test_workers_are_restarted_one_after_the_other_and_no_token_changes(workers: Workers) -> None:
    addresses = [workers.up() for _ in range(2)]
    async with workers.engine(*addresses, max_num_seqs=8) as engine:
        expected = {name: await stream for name, stream in (await load(engine)).items()}
        epochs = [loop.epoch for loop in engine.workers.all]
        for address in addresses:
            streams = await load(engine)
            await gain(engine, loop_of(engine, address))
            workers.signal(address, signal.SIGTERM)
            assert await workers.ended(address) == 0
            workers.up(address)
            await until(lambda: all(loop.admits for loop in engine.workers.all))
            await check(streams, expected)
        assert all(loop.epoch > epoch for loop, epoch in zip(engine.workers.all, epochs, strict=True))
        assert [loop.num_losses for loop in engine.workers.all] == [0, 0]


async def test_an_idle_worker_leaves_at_once(workers: Workers) -> None:
    """The worker's session ends when it is drained, not after the grace."""
    address = workers.up("127.0.0.1:0", "--grace", "1000")
    async with workers.engine(address) as engine:
        assert len(await text_of(engine, await submit(engine, "a", [5]))) == 5
        workers.signal(address, signal.SIGTERM)
        assert await workers.ended(address) == 0
        (loop,) = engine.workers.all
        await until(lambda: loop.state is WorkerStatus.CONNECTING)
        assert loop.num_losses == 0


async def test_the_newer_of_two_schedulers_has_the_worker_and_the_older_waits(workers: Workers) -> None:
    """No token is computed for both schedulers, and they do not take the worker from each other in turns."""
    address = workers.up()
    prompt, most = [*range(3, 30)], {"max_tokens": 300}
    async with workers.engine(address) as older:
        (was,) = older.workers.all
        first = await submit(older, "first", prompt, **most)
        await gain(older, was)
        async with workers.engine(address) as newer:
            (now,) = newer.workers.all
            assert now.epoch > was.epoch
            expected = await tokens_of(newer, await submit(newer, "second", prompt, **most))
            await until(lambda: was.state is WorkerStatus.SUPERSEDED)
            assert f"another scheduler has taken the worker, with epoch {now.epoch}" in was.last_error
            steps = was.num_steps
            assert_equal(await tokens_of(newer, await submit(newer, "third", prompt, **most)), expected)
            assert (was.num_steps, now.num_losses) == (steps, 0)
            assert older.group(first).suspicion is None
        assert_equal(await tokens_of(older, first), expected)  # the other one has gone
        assert was.state is WorkerStatus.SERVING
