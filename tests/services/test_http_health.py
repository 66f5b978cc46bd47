"""Probes over HTTP follow the engine and its workers."""

import asyncio
from pathlib import Path

import aiohttp
from engines import running, until
from fake_worker_service import FakeWorkerService, serving
from http_edge import http_edge
from ports import free_address

NOTICED_SECONDS = 2.0


async def status_of(session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
    """The status of a probe, and the seconds after which to try again."""
    async with session.get(path) as answer:
        return answer.status, answer.headers.get("Retry-After", "")


async def test_readiness_follows_the_last_worker_within_two_seconds(byte_tokenizer_directory: Path) -> None:
    address = free_address()
    async with running(address) as one, http_edge(one.link) as url, aiohttp.ClientSession(url) as session:
        one.front_ends.tell_serving(serving=True)

        async def becomes(expected: tuple[int, str]) -> None:
            async with asyncio.timeout(NOTICED_SECONDS):
                while await status_of(session, "/readiness") != expected:
                    pass

        await becomes((503, "1"))
        async with serving(FakeWorkerService(byte_tokenizer_directory), address):
            await until(lambda: one.workers.serving)
            await becomes((200, ""))
        await becomes((503, "1"))
        assert await status_of(session, "/health") == (200, "")
        async with session.get("/health", headers={"X-Request-Id": "mine"}) as answer:
            assert answer.headers["X-Request-Id"] == "mine"
        async with serving(FakeWorkerService(byte_tokenizer_directory), address):
            await until(lambda: one.workers.serving)
            await becomes((200, ""))
