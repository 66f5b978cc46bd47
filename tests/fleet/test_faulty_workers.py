"""Workers that run out of memory, are slow, or die of a request: real ones, with a fault built in."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fleet_helpers import Serve
from processes import Member, Supervisor, Workers, faulty_worker

from pagewire_client import SamplingParams

POISON = "~"


@pytest.fixture
def faulty(model: Path) -> Iterator[Any]:
    """Starts workers with faults; ready when it returns."""
    members: list[Member] = []

    def start(count: int = 1, **faults: object) -> list[Member]:
        started = [faulty_worker(model, **faults).start() for _ in range(count)]
        members.extend(started)
        for member in started:
            member.wait_for("ready")
        return started

    yield start
    for member in members:
        member.kill()


async def test_running_out_of_memory_in_a_step_moves_its_streams(workers: Workers, serve: Serve, faulty: Any) -> None:
    (sound,) = workers.up(1)
    (starved,) = faulty()
    fleet = await serve([starved.address, sound.address])
    async with fleet.load() as load:
        for _ in range(2):
            await fleet.until(lambda state: bool(state.workers[0].num_running))
            starved.signal(signal.SIGUSR1)
            await asyncio.to_thread(starved.wait_for, "out of memory in a step")
            await load.gain(100)
    await fleet.check_empty()
    assert starved.is_running


async def test_a_slow_worker_does_not_set_the_pace_of_fast_ones(workers: Workers, serve: Serve, faulty: Any) -> None:
    fast = workers.up(2)
    (slow,) = faulty(step_seconds=0.05)
    fleet = await serve([slow.address, *(member.address for member in fast)])
    async with fleet.load() as load:
        await fleet.until(lambda state: bool(state.workers[0].num_steps))
        await load.gain(1000)
    state = await fleet.check_empty()
    assert state.workers[0].num_steps < min(worker.num_steps for worker in state.workers[1:])


async def test_a_request_that_kills_every_worker_is_ended_before_the_fleet_is(
    model: Path, serve: Serve, faulty: Any
) -> None:
    """It gets an error that says so after a few workers; everybody else only waits for those to be up again."""
    from transformers import AutoTokenizer

    (poison,) = AutoTokenizer.from_pretrained(model).encode(POISON)
    members = faulty(count=2, poison=poison)
    fleet = await serve([member.address for member in members])
    with Supervisor(members) as supervisor:
        async with fleet.load(8) as load:
            await load.gain(100)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in fleet.client.generate(f"a {POISON} in it", SamplingParams(max_tokens=20)):
                    pass
            await load.gain(100)
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert "workers failed in a row while computing this request" in str(error.value.details())
        assert 1 <= supervisor.num_restarts <= 4
        await fleet.check_empty()
