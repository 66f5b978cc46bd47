"""Workers that run out of memory, are slow, or die of a request: real ones, with a fault built in."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fleet_helpers import Scale, Serve
from load import Load
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


@pytest.mark.alone
async def test_a_slow_worker_does_not_set_the_pace_of_fast_ones(
    model: Path, serve: Serve, faulty: Any, scale: Scale
) -> None:
    """Ten times as slow, it has room for everybody, and is given little: nearly all is done sooner elsewhere."""
    fast, slow = faulty(count=2, step_seconds=0.05), faulty_worker(model, step_seconds=0.5)
    fleet = await serve([slow.address, *(member.address for member in fast)])
    try:
        async with Load(fleet.client, fleet.streamed, fleet.expected) as load:
            await load.gain(50)
            alone, _ = await load.rates(scale(200, 2000))
            await asyncio.to_thread(slow.start().wait_for, "ready")
            await fleet.until(lambda state: state.workers[0].connected)
            beside, _ = await load.rates(scale(400, 4000))
            slow.signal(signal.SIGUSR2)  # that the last streams do not take so long
        state = await fleet.check_empty()
    finally:
        slow.kill()
    print(f"tokens a second of fast workers: {alone:.0f}, with a slow one beside them: {beside:.0f}")  # noqa: T201
    assert beside > (0.9 if scale.is_full else 0.75) * alone
    assert state.workers[0].num_steps


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
        assert 1 <= supervisor.num_restarts <= 7  # five, and more on a machine that holds steps up
        await fleet.check_empty()
