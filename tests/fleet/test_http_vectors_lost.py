"""Vectors and scores over HTTP, while a worker and the engine are lost: the same numbers, late."""

import asyncio
import signal
from typing import Any

import aiohttp
import pytest
from fleet_helpers import Serve
from processes import Workers

from bench.systems.processes import engine_process

TEXTS = [f"{number} " * (1 + number) for number in range(40)]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": TEXTS},
    "/pooling": {"input": TEXTS[:20], "task": "token_embed"},
    "/v1/score": {"queries": "a query", "documents": TEXTS},
    "/v1/rerank": {"query": "a query", "documents": TEXTS, "top_n": 5},
}
KEYS = ("embedding", "data", "score", "relevance_score", "index")
"""The fields of the answers' elements that have numbers."""


def numbers(answer: Any) -> list[float]:
    """All vectors and scores of an answer, one after the other."""
    if isinstance(answer, list):
        return [number for one in answer for number in numbers(one)]
    if isinstance(answer, dict):
        answer = answer.get("data", answer.get("results")) or [answer[name] for name in KEYS if name in answer]
        return numbers(answer)
    return [answer]


async def test_a_lost_worker_and_a_lost_engine_are_a_pause_of_vectors_and_scores(
    workers: Workers, serve: Serve
) -> None:
    members = workers.up(2)
    fleet = await serve([member.address for member in members])
    async with aiohttp.ClientSession(f"http://{fleet.scheduler.http_address}") as session:

        async def ask(route: str) -> list[float]:
            async with session.post(route, json=CALLS[route]) as answer:
                assert answer.status == 200, await answer.text()
                return numbers(await answer.json())

        undisturbed = {route: await ask(route) for route in CALLS}
        assert min(map(len, undisturbed.values())) >= 5
        is_over = False

        async def keep_up(route: str) -> None:
            """The call, made anew as often as it ends, until both were lost."""
            is_last = False
            while not is_last:
                is_last = is_over
                assert await ask(route) == pytest.approx(undisturbed[route], abs=1e-5)

        async with asyncio.TaskGroup() as calls:
            for route in CALLS:
                calls.create_task(keep_up(route))
            await fleet.until(lambda state: all(worker.num_running for worker in state.workers))
            members[0].signal(signal.SIGKILL)
            await fleet.until(lambda state: sum(worker.num_losses for worker in state.workers) == 1)
            members[0].wait()
            await fleet.until(lambda state: any(worker.num_running for worker in state.workers))
            engine_process(fleet.scheduler.pid).kill()
            await asyncio.to_thread(fleet.scheduler.wait_for, "requests go on in the next engine", 60)
            is_over = True
    await fleet.check_empty()
