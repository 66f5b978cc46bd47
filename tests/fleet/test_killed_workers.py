"""SIGKILL: to a stream, the loss of its worker is a pause and nothing else."""

import asyncio
import random
import signal
import time

import pytest
from cluster import front_ends, is_busy
from fleet_helpers import Fleet, Scale, Serve, storm
from processes import Member, Supervisor, Workers

from bench.systems.processes import engine_process
from pagewire_client import POOLING_ALL, POOLING_CLS, POOLING_LAST, POOLING_MEAN

MEMORY_GROWTH = 16 << 20
"""Bytes that the scheduler may have more at the end than halfway, because its heaps grow and shrink."""


async def kill_one(fleet: Fleet, members: list[Member], draw: random.Random) -> Member:
    """SIGKILL a random worker that is computing something."""
    state = await fleet.until(lambda state: any(map(is_busy, state.workers)))
    busy = {worker.address for worker in state.workers if is_busy(worker)}
    victim = draw.choice([member for member in members if member.address in busy])
    await asyncio.to_thread(victim.kill)
    return victim


async def test_workers_are_killed_one_after_the_other_and_no_stream_notices(
    workers: Workers, serve: Serve, scale: Scale
) -> None:
    """Random workers, again and again: all outputs are those of an undisturbed run, and the scheduler does not grow."""
    num_kills = scale(3, 30)
    members = workers.up(3)
    fleet = await serve([member.address for member in members])
    process = engine_process(fleet.scheduler.pid)
    draw = random.Random(0)
    memory = []
    async with fleet.load() as load:
        await load.gain(scale(100, 300))
        for _ in range(num_kills):
            victim = await kill_one(fleet, members, draw)
            await load.gain(scale(100, 4000))  # on the others
            victim.start()
            await asyncio.to_thread(victim.wait_for, "ready")
            memory.append(sum(one.memory_info().rss for one in (process, *front_ends(fleet.scheduler.address))))
    await fleet.check_empty()
    state = await fleet.until(lambda state: all(worker.connected for worker in state.workers))
    assert sum(worker.num_losses for worker in state.workers) >= num_kills
    settled = max(memory[: num_kills // 2])  # by then it has made everything that it keeps
    grown = memory[-1] - settled
    print(f"{load.num_completed} streams through {num_kills} kills; MiB after each:", [m >> 20 for m in memory])  # noqa: T201
    assert grown < MEMORY_GROWTH


async def test_vectors_beside_streams_are_the_same_through_kills(workers: Workers, serve: Serve, scale: Scale) -> None:
    """Of every pooling: what was summed up on a lost worker is summed up again."""
    poolings = [POOLING_CLS, POOLING_MEAN, POOLING_LAST, POOLING_ALL]
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 200))) for _ in range(scale(30, 600))]
    members = workers.up(2)
    fleet = await serve([member.address for member in members])
    expected = [await fleet.client.embed(texts, pooling=pooling) for pooling in poolings]
    async with fleet.load(8) as load:
        await load.gain(50)
        calls = asyncio.gather(*(fleet.client.embed(texts, pooling=pooling) for pooling in poolings))
        for _ in range(scale(2, 10)):
            victim = await kill_one(fleet, members, draw)
            await load.gain(50)
            victim.start()
            await asyncio.to_thread(victim.wait_for, "ready")
        for found, right in zip(await calls, expected, strict=True):
            for one, other in zip(found, right, strict=True):
                assert list(one.vector) == pytest.approx(list(other.vector), abs=1e-5)
                assert len(one.data) == len(other.data)
    await fleet.check_empty()


async def test_the_only_worker_is_killed_and_its_successor_goes_on(workers: Workers, serve: Serve) -> None:
    (member,) = workers.up(1)
    fleet = await serve([member.address])
    async with fleet.load(8) as load:
        await load.gain(100)
        member.kill()
        member.start()
        await asyncio.to_thread(member.wait_for, "ready")
        await load.gain(100)
    await fleet.check_empty()


async def test_all_workers_are_killed_at_once(workers: Workers, serve: Serve) -> None:
    members = workers.up(2)
    fleet = await serve([member.address for member in members])
    async with fleet.load() as load:
        await load.gain(100)
        for member in members:
            member.signal(signal.SIGKILL)
        for member in members:
            member.kill()
            member.start()
        await load.gain(100)
    await fleet.check_empty()


async def test_no_request_is_ended_in_a_storm_of_kills(workers: Workers, serve: Serve, scale: Scale) -> None:
    """Every three seconds a worker that serves is killed, and a start takes longer: few steps get through.

    Any error would end a stream, and the streams must gain the tokens of an undisturbed run.
    """
    members = workers.up(2)
    fleet = await serve([member.address for member in members], "--no-worker-timeout", "600")
    with Supervisor(members):
        async with fleet.load(24) as load:
            await load.gain(100)
            ends = time.monotonic() + 600
            num_kills = await storm(
                fleet, members, load, lambda kills: time.monotonic() >= ends if scale.is_full else kills == 3
            )
        await fleet.check_empty()
    print(f"{load.num_completed} streams, {load.num_tokens} tokens through {num_kills} kills")  # noqa: T201
    assert num_kills >= scale(3, 60)
