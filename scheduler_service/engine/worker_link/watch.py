"""Watches a worker during a session: whether it answers, and whether it shuts down.

A worker that answers steps is alive, so the scheduler does not ask for the worker's health. The scheduler asks for a
worker's health if the worker has no step or takes long for a step. A healthy worker answers within milliseconds even in
the middle of a step.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Never

from scheduler_service.engine.worker_link.client import Session, UnreachableError, WorkerClient, WorkerError

MAX_FAILED_CHECKS = 3


async def watch_health(client: WorkerClient, num_steps: Callable[[], int], interval: float) -> Never:
    """Raise WorkerError if the worker neither answers steps nor reports its health. `num_steps` returns the number of
    answered steps.

    `interval` is the pause between two health checks in seconds, and the time limit of each check.
    """
    while True:
        num_before = num_steps()
        await asyncio.sleep(interval)
        for _ in range(MAX_FAILED_CHECKS):
            if num_steps() != num_before or await _answers(client, interval):
                break
        else:
            raise WorkerError(f"the worker failed {MAX_FAILED_CHECKS} health checks in a row, of {interval:g} s each")


async def _answers(client: WorkerClient, timeout: float) -> bool:
    began = perf_counter()
    try:
        await client.is_serving(timeout)
    except UnreachableError:
        # after a check that failed early, wait until `timeout` is over
        await asyncio.sleep(began + timeout - perf_counter())
        return False
    return True


async def watch_steps(session: Session, timeout: float) -> Never:
    """Raise WorkerError when a step takes more than `timeout` seconds. The time is checked every quarter of `timeout`,
    so the error may be raised up to this much later.

    A step's time begins when the worker can begin the step: the step was sent, and the previous step was answered.
    """
    while True:
        since = session.waiting_since
        left = timeout if since is None else since + timeout - perf_counter()
        if left <= 0:
            raise WorkerError(f"the worker has not answered a step for {timeout:g} s")
        await asyncio.sleep(min(left, timeout / 4))


async def watch_leaving(client: WorkerClient, tell: Callable[[bool], None]) -> Never:
    """Call `tell` with whether the worker shuts down: at once, and after each change."""
    async for is_serving in client.watch_serving():
        tell(not is_serving)
    await asyncio.Event().wait()  # the connection broke; the functions above decide whether the worker is lost
    raise AssertionError
