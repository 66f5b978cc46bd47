"""A fleet's processes, clients and load."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from cluster import ClusterState, cluster_state, holds_blocks, until_idle
from load import Load, Outcome, Request
from processes import Member

from pagewire_client import Client


@dataclass(frozen=True)
class Scale:
    """The size of a test: small, or full with --chaos."""

    is_full: bool

    def __call__(self, little: int, full: int) -> int:
        return full if self.is_full else little


@dataclass
class Fleet:
    """A serving scheduler and its client."""

    scheduler: Member
    client: Client
    requests: Sequence[Request]
    expected: dict[str, Outcome]
    num_streams: int = 0
    """Default number of streams of a load."""

    def load(self, count: int | None = None) -> Load:
        """Streams of one request after the other."""
        requests = list(islice(cycle(self.requests), self.num_streams if count is None else count))
        return Load(self.client, requests, self.expected)

    @property
    def streamed(self) -> list[Request]:
        """Requests whose tokens come one by one, without beams and the best of several."""
        return [item for item in self.requests if not (item.sampling.best_of or item.sampling.beam_width)]

    async def state(self) -> ClusterState:
        return await cluster_state(self.scheduler.admin_address)

    async def until(self, is_reached: Callable[[ClusterState], bool], timeout: float = 60.0) -> ClusterState:
        """The first state of the cluster in which `is_reached`."""
        async with asyncio.timeout(timeout):
            while True:
                if is_reached(state := await self.state()):
                    return state
                await asyncio.sleep(0.03)

    async def check_empty(self) -> ClusterState:
        """Wait until nothing runs, and check that no block is held on any worker."""
        state = await until_idle(self.scheduler.admin_address)
        assert not any(map(holds_blocks, state.workers)), state
        return state


Serve = Callable[..., Awaitable[Fleet]]


async def storm(fleet: Fleet, members: Sequence[Member], load: Load, is_over: Callable[[int], bool]) -> int:
    """Every three seconds SIGKILL a random serving member, until `is_over` of the number of kills.

    Returns this number; raises a stream's error.
    """
    draw = random.Random(1)
    num_kills = 0
    by_address = {member.address: member for member in members}
    while not is_over(num_kills):
        load.check()
        state = await fleet.state()
        if serving := [by_address[worker.address] for worker in state.workers if worker.connected]:
            draw.choice(serving).signal(signal.SIGKILL)
            num_kills += 1
        await asyncio.sleep(3)
    return num_kills
