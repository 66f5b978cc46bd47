"""Workers that run out of memory, are slow, or die of a request: real ones, with a fault built in."""

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from faulty_worker import POISONED
from fleet_helpers import Fleet, Scale, Serve, storm
from load import Load
from processes import Member, Supervisor, Workers, faulty_worker

from pagewire_client import SamplingParams

POISON = "~"
MAX_LOSSES = 16
"""Losses until a request that kills every worker is ended, while other requests kill workers too: 8 to 11 were seen."""


@pytest.fixture(scope="session")
def poison(model: Path) -> int:
    """The token that kills faulty workers, which no honest request has."""
    from transformers import AutoTokenizer

    (token,) = AutoTokenizer.from_pretrained(model).encode(POISON)
    return int(token)


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


async def test_a_slow_worker_does_not_set_the_pace_of_fast_ones(
    model: Path, serve: Serve, faulty: Any, scale: Scale
) -> None:
    """It is ten times as slow, has room for every request, and is given few: nearly all are done sooner elsewhere."""
    fast, slow = faulty(count=2, step_seconds=0.05), faulty_worker(model, step_seconds=0.5)
    fleet = await serve([slow.address, *(member.address for member in fast)])
    try:
        async with Load(fleet.client, fleet.streamed, fleet.expected) as load:
            await load.gain(50)
            alone, _ = await load.rates(scale(200, 2000))
            await asyncio.to_thread(slow.start().wait_for, "ready")
            await fleet.until(lambda state: state.workers[0].connected)
            running = []
            for _ in range(8):
                await load.gain(scale(50, 200))
                running += [[worker.num_running for worker in (await fleet.state()).workers]]
            beside, _ = await load.rates(scale(50, 4000))
            slow.signal(signal.SIGUSR2)  # so that the last streams take less time
        state = await fleet.check_empty()
    finally:
        slow.kill()
    print(f"tokens a second of fast workers: {alone:.0f}, with a slow one beside them: {beside:.0f}")  # noqa: T201
    of_slow, of_fast, of_other = map(sum, zip(*running, strict=True))
    assert of_slow < (of_fast + of_other) / 3  # it had one or two of twelve at any time; an even share is four
    assert state.workers[0].num_steps
    assert not scale.is_full or beside > 0.9 * alone


async def test_a_request_that_kills_every_worker_is_ended_before_the_fleet_is(
    serve: Serve, faulty: Any, poison: int
) -> None:
    """It ends with an error that says so after a few losses; other requests only wait for the workers to return."""
    members = faulty(count=2, poison=poison, step_seconds=0.02)  # what waits need not be busy
    fleet = await serve([member.address for member in members])
    with Supervisor(members) as supervisor:
        async with fleet.load(8) as load:
            await load.gain(100)
            await end_of_poison(fleet)
            await load.gain(100)
        assert 1 <= supervisor.statuses.count(POISONED) <= 7  # five, and more on a machine that holds steps up
        await fleet.check_empty()


async def test_a_request_that_kills_every_worker_is_found_in_a_storm_of_kills(
    serve: Serve, faulty: Any, poison: int, scale: Scale
) -> None:
    """One after the other for ten minutes, and no other stream is ended."""
    if not scale.is_full:
        pytest.skip("takes minutes, for it is tried on workers that must start again in between; make chaos has it")
    members = faulty(count=2, poison=poison)
    fleet = await serve([member.address for member in members], "--no-worker-timeout", "600")
    ends = time.monotonic() + 600
    num_losses: list[int] = []  # of each, some of which were the storm's doing

    async def send() -> None:
        while time.monotonic() < ends:
            began = time.monotonic()
            num_losses.append(await end_of_poison(fleet))
            print(f"ended after {num_losses[-1]} losses of workers, {time.monotonic() - began:.0f} s")  # noqa: T201

    with Supervisor(members) as supervisor:
        async with fleet.load(24) as load:
            await load.gain(100)
            sending = asyncio.create_task(send())
            num_kills = await storm(fleet, members, load, lambda _: sending.done())
            await sending
        await fleet.check_empty()
    num_poisoned = supervisor.statuses.count(POISONED)
    print(f"{load.num_completed} streams through {num_kills} kills and {num_poisoned} poisoned workers")  # noqa: T201
    assert num_kills >= 30  # as often as workers start again: 53 on two cores with a load of 10
    assert 2 * num_poisoned > sum(num_losses)
    assert max(num_losses) <= MAX_LOSSES


async def end_of_poison(fleet: Fleet) -> int:
    """Send a request that kills its workers. Returns how many its error says were lost."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in fleet.client.generate(f"a {POISON} in it", SamplingParams(max_tokens=20)):
            pass
    assert error.value.code() is grpc.StatusCode.INTERNAL
    said = re.match(r"(\d+) workers failed in a row while computing this request", str(error.value.details()))
    assert said, error.value.details()
    return int(said[1])
