"""Two schedulers pointed at one worker: a mistake that shows, and costs no stream a token."""

import asyncio

from fleet_helpers import Serve
from processes import Workers

from pagewire.v1.admin_service_pb2 import WORKER_STATUS_SUPERSEDED

PATIENT = ("--no-worker-timeout", "600")


async def test_the_newer_takes_the_worker_and_the_older_waits_and_says_so(workers: Workers, serve: Serve) -> None:
    """No token is computed for both: while the newer scheduler's session lasts, the older one is given nothing. What it
    was given before may still be on its way to its clients."""
    (member,) = workers.up(1)
    older = await serve([member.address], *PATIENT)
    async with older.load(8) as waiting:
        await waiting.gain(100)
        newer = await serve([member.address], *PATIENT)
        async with newer.load(8) as load:  # a session begins with its first step
            state = await older.until(lambda state: state.workers[0].status == WORKER_STATUS_SUPERSEDED)
            assert "another scheduler has taken the worker" in state.workers[0].last_error
            await load.gain(300)
            after = await older.state()
            assert after.num_output_tokens == state.num_output_tokens
            assert after.num_waiting == 8
        assert (await older.state()).workers[0].status == WORKER_STATUS_SUPERSEDED
        ours = (await newer.state()).workers[0]
        assert ours.epoch > state.workers[0].epoch
        assert ours.num_losses == 0
        await newer.check_empty()
        await asyncio.to_thread(newer.scheduler.kill)
        await waiting.gain(100)
    await older.check_empty()
