"""Workers that do not answer: stopped processes, and connections that lead nowhere."""

import signal

from fleet_helpers import Fleet, Scale, Serve
from load import Load
from processes import Workers
from tcp_proxy import tcp_proxy

WATCHFUL = ("--health-interval", "0.5")
"""Three checks of half a second: a worker that hangs is lost after about two."""


async def until_lost(fleet: Fleet, load: Load, address: str) -> None:
    """The worker that hangs there is given up, and all streams go on without it."""
    losses = {worker.address: worker.num_losses for worker in (await fleet.state()).workers}
    await fleet.until(lambda state: any(w.num_losses > losses[address] for w in state.workers if w.address == address))
    await load.gain(100)


async def until_back(fleet: Fleet, address: str) -> None:
    await fleet.until(lambda state: any(w.connected and w.num_running for w in state.workers if w.address == address))


async def test_a_stopped_process_is_given_up_and_nothing_that_it_says_later_counts(
    workers: Workers, serve: Serve, scale: Scale
) -> None:
    """SIGSTOP, and SIGCONT when its streams have long gone on elsewhere: it finishes its step, and that is ignored."""
    members = workers.up(2)
    fleet = await serve([member.address for member in members], *WATCHFUL)
    async with fleet.load() as load:
        await load.gain(100)
        for number in range(scale(2, 20)):
            member = members[number % 2]
            await until_back(fleet, member.address)
            member.signal(signal.SIGSTOP)
            try:
                await until_lost(fleet, load, member.address)
            finally:
                member.signal(signal.SIGCONT)
            await until_back(fleet, member.address)
    await fleet.check_empty()


async def test_a_connection_that_leads_nowhere_is_given_up_and_found_again(
    workers: Workers, serve: Serve, scale: Scale
) -> None:
    near, far = workers.up(2)
    async with tcp_proxy(far.address) as proxy:
        fleet = await serve([proxy.address, near.address], *WATCHFUL)
        async with fleet.load() as load:
            await load.gain(100)
            for _ in range(scale(1, 20)):
                await until_back(fleet, proxy.address)
                proxy.swallow()
                await until_lost(fleet, load, proxy.address)
                proxy.heal()
                await until_back(fleet, proxy.address)
        await fleet.check_empty()
