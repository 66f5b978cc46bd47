"""Runs the parts of one request, such as the conversations of a batch, at the same time."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all parts. Raises the first error; the other parts are cancelled, and have ended by then.

    The parts begin in turn: begun at once, 256 of them would hold the event loop for 50 ms.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        for part in parts:
            tasks.append(asyncio.create_task(part))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
