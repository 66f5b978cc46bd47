"""Fleets that grow and shrink, and are replaced process by process, while streams run."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_helpers import Scale, Serve
from load import Load
from processes import Member, Workers, faulty_worker

STEP_SECONDS = 0.15
"""So long that the other costs of a step hardly count, even on a busy machine."""
FEW_SEQS = 4


@pytest.fixture
def slow_workers(model: Path) -> Iterator[list[Member]]:
    """Three workers whose steps take a known time, so that two cores do not limit them. None is started."""
    members = [faulty_worker(model, "--grace", grace, step_seconds=STEP_SECONDS) for grace in ("30", "30", "0.1")]
    yield members
    for member in members:
        member.kill()


async def start(*members: Member) -> None:
    for member in members:
        member.start()
    for member in members:
        await asyncio.to_thread(member.wait_for, "ready")


async def end(member: Member, grace: float = 60.0) -> None:
    """SIGTERM, and exit status 0."""
    member.signal(signal.SIGTERM)
    assert await asyncio.to_thread(member.wait, grace) == 0


async def test_throughput_follows_the_number_of_workers_up_and_down(
    slow_workers: list[Member], serve: Serve, scale: Scale
) -> None:
    """One worker leaves when its streams have ended; the other's streams move after its short grace. Both exit 0."""
    first, *others = slow_workers
    await start(first)
    fleet = await serve([member.address for member in slow_workers], "--max-num-seqs", str(FEW_SEQS))
    async with Load(fleet.client, fleet.streamed[:16], fleet.expected) as load:
        one, _ = await load.rates(scale(60, 300))
        await start(*others)
        await fleet.until(lambda state: all(worker.num_running for worker in state.workers))
        three, _ = await load.reach(lambda tokens, _: tokens > 2 * one, scale(150, 900))
        others[0].signal(signal.SIGUSR2)  # it has the time to finish what it has
        await asyncio.gather(*map(end, others))
        again, _ = await load.rates(scale(60, 300))
        first.signal(signal.SIGUSR2)
    print(f"tokens a second with 1, 3 and 1 workers: {one:.0f}, {three:.0f}, {again:.0f}")  # noqa: T201
    assert three > 2 * max(one, again)
    await fleet.check_empty()


async def test_every_worker_is_restarted_in_turn_and_no_caller_notices(
    workers: Workers, serve: Serve, scale: Scale
) -> None:
    """Each process by SIGTERM. Clients do not retry, so an error would show."""
    members = workers.up(scale(2, 3))
    fleet = await serve([member.address for member in members])
    async with fleet.load() as load:
        for _ in range(scale(1, 5)):
            for member in members:
                await load.gain(100)
                await end(member)
                await start(member)
        await load.gain(100)
    await fleet.check_empty()


async def test_the_scheduler_is_restarted_and_callers_that_try_again_only_wait(
    workers: Workers, serve: Serve, scale: Scale
) -> None:
    """By SIGTERM, and by SIGKILL."""
    members = workers.up(scale(2, 3))
    fleet = await serve([member.address for member in members], "--grace", "0.5", retry_for=120.0)
    async with fleet.load() as load:
        for _ in range(scale(1, 5)):
            for leave in (end, kill):
                await load.gain(100)
                await leave(fleet.scheduler)
                await start(fleet.scheduler)
                await load.gain(100)
    await fleet.check_empty()


async def kill(member: Member) -> None:
    await asyncio.to_thread(member.kill)
