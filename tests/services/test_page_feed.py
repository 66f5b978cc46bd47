"""What a page in a browser sees of the engine, and what it may do."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engines import OneProcess, running, until
from fake_worker_service import FakeWorkerService, serving
from http_edge import http_edge
from locked import KEYRING, KEYS
from page_states import State, apply_frame, new_state

from scheduler_service.access.keys import Keyring
from scheduler_service.frontend.http.page import files
from scheduler_service.frontend.link import feed
from scheduler_service.operations.cluster_state import cluster_state

ADMIN = {"Authorization": f"Bearer {KEYS['admin']}"}


class Shown:
    """A page that reads the feed."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.frames: list[dict[str, Any]] = []
        self.state: State = new_state()

    async def read(self) -> dict[str, Any] | None:
        """The next frame; None at the end of the stream."""
        while line := await self._answer.content.readline():
            if line.startswith(b"data: "):
                frame: dict[str, Any] = json.loads(line[6:])
                self.frames.append(frame)
                apply_frame(self.state, frame)
                return frame
        return None

    async def until(self, holds: Any) -> None:
        while not holds(self.state):
            assert await self.read() is not None


@asynccontextmanager
async def edge(
    tokenizer: Path, keyring: Keyring | None = None, **settings: object
) -> AsyncIterator[tuple[OneProcess, FakeWorkerService, aiohttp.ClientSession]]:
    worker = FakeWorkerService(tokenizer)
    async with (
        serving(worker) as address,
        running(address, keyring=keyring, **settings) as one,
        http_edge(one.link) as url,
        aiohttp.ClientSession(url) as session,
    ):
        one.front_ends.pages.commands = one.admin.commands
        await until(lambda: one.workers.admits)
        yield one, worker, session


@asynccontextmanager
async def opened(session: aiohttp.ClientSession, **headers: str) -> AsyncIterator[Shown]:
    async with session.get("/page/feed", headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        yield Shown(answer)


async def test_the_page_shows_the_numbers_of_the_admin_service_and_costs_nothing_when_it_is_closed(
    byte_tokenizer_directory: Path,
) -> None:
    async with edge(byte_tokenizer_directory) as (one, worker, session):
        (engine_worker,) = one.workers.all
        blocks = engine_worker.scheduler.blocks
        assert blocks.device.changed is None
        worker.stops_at = 3
        body = {"model": "fake", "prompt": "a prompt of several blocks", "max_tokens": 100, "ignore_eos": True}
        asking = asyncio.create_task(session.post("/v1/completions", json=body))
        await until(lambda: worker.num_steps == 3)
        async with opened(session) as page, opened(session) as other:
            await other.read()
            await page.until(lambda state: state["requests"])
            assert page.frames[0]["snapshot"]
            admin = cluster_state(one.front_ends)
            ((address, shown),) = page.state["workers"].items()
            (told,) = admin.workers
            assert address == shown["address"] == told.address
            assert shown["state"] == "serving"
            numbers = ("device_blocks", "free_device", "running", "epoch", "losses", "preemptions", "block_size")
            assert [shown[name] for name in numbers] == [
                told.num_device_blocks,
                told.num_free_device_blocks,
                told.num_running,
                told.epoch,
                told.num_losses,
                told.num_preemptions,
                8,
            ]
            assert page.state["totals"]["waiting"] == admin.num_waiting
            assert page.state["totals"]["prompt_tokens"] == admin.num_prompt_tokens
            ((_, request),) = page.state["requests"].items()
            assert request["worker"] == address
            held = [block for block, state in enumerate(page.state["pools"][address]["device"]) if state == "1"]
            assert sorted(request["tables"]["0"]) == held
            worker.runs.set()
            await page.until(lambda state: not state["requests"])
            (end,) = next(frame["ended"] for frame in page.frames if "ended" in frame)
            assert end["status"] == "length_capped"
            assert page.state["totals"]["output_tokens"] == 100
        (await asking).close()
        await until(lambda: not one.front_ends.pages.is_open)
        assert blocks.device.changed is None
        assert blocks.host.changed is None
        assert one.front_ends.pages._looking is None
        assert not len(one.link.feed)


async def test_a_lost_worker_is_told_in_words_and_its_requests_are_followed(byte_tokenizer_directory: Path) -> None:
    async with edge(byte_tokenizer_directory) as (_, worker, session):
        worker.stops_at = 3
        body = {"model": "fake", "prompt": "a prompt", "max_tokens": 100, "ignore_eos": True}
        asking = asyncio.create_task(session.post("/v1/completions", json=body))
        await until(lambda: worker.num_steps == 3)
        async with opened(session) as page:
            await page.until(lambda state: state["requests"])

            def spoil_once(answer: object) -> object:
                worker.spoil = lambda answer: answer
                return b"no message"

            worker.spoil = spoil_once
            worker.runs.set()
            while "losses" not in page.state["totals"] or not page.state["totals"]["losses"]:
                await page.read()
            await page.until(lambda state: not state["requests"])
            events = [event for frame in page.frames for event in frame.get("events", ())]
            kinds = [event["kind"] for event in events]
            assert {"worker_lost", "worker_ready", "moved"} == set(kinds)  # and no preemption
            told = [fields for frame in page.frames for fields in frame.get("requests", {}).values() if fields]
            assert max(fields.get("moves", 0) for fields in told) == 1
            assert not any(fields.get("preemptions") or fields.get("recomputes") for fields in told)
            assert page.state["totals"]["preemptions"] == 0
            assert (
                next(e["text"] for e in events if e["kind"] == "moved").partition(" lost, ")[2][:16]
                == "1 request moved "
            )
        (await asking).close()


async def test_only_keys_that_administer_see_and_command(byte_tokenizer_directory: Path) -> None:
    async with edge(byte_tokenizer_directory, KEYRING) as (one, _, session):
        (worker,) = one.workers.all
        iron = {"Authorization": f"Bearer {KEYS['iron']}"}
        drain = {"worker": worker.client.address}
        for headers, status in (({}, 401), (iron, 403), (ADMIN, 200)):
            async with session.get("/page/feed", headers=headers) as answer:
                assert answer.status == status
            async with session.post("/page/drain", headers=headers, json=drain) as answer:
                assert answer.status == status
            assert worker.draining is (status == 200)
        async with session.post("/page/undrain", headers=ADMIN, json=drain) as answer:
            assert answer.status == 200
        assert not worker.draining
        async with session.post("/page/drain", headers=ADMIN, json={"worker": "nowhere:1"}) as answer:
            assert answer.status == 404
            assert "nowhere:1" in (await answer.json())["error"]["message"]
        async with session.post("/page/flush", headers=ADMIN) as answer:
            assert await answer.json() == {"num_blocks": 0}
        async with session.get("/page/adapters", headers=ADMIN) as answer:
            assert await answer.json() == {"adapters": []}
        async with session.post("/page/learn/kill-worker", headers=ADMIN, json={}) as answer:
            assert answer.status == 400
            assert "pagewire serve" in (await answer.json())["error"]["message"]
        async with session.get("/page/info") as answer:  # a page asks before it has a key
            info = await answer.json()
            assert (info["keys"], info["learn"], info["recording"]) == (True, False, None)


async def test_a_page_asks_pagewire_serve_by_its_pipe_to_kill_the_worker(byte_tokenizer_directory: Path) -> None:
    ours, theirs = os.pipe()
    try:
        async with edge(byte_tokenizer_directory, learn_pipe=theirs) as (_, _, session):
            async with session.get("/page/info") as answer:
                assert (await answer.json())["learn"]
            for asked in ({}, {"small_pool": True}, {"small_pool": False}):
                async with session.post("/page/learn/kill-worker", json=asked) as answer:
                    assert answer.status == 200
            assert os.read(ours, 64) == b"ksw"
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"X-Forwarded-For": "203.0.113.7"}],
)
async def test_without_keys_only_this_machine_commands(byte_tokenizer_directory: Path, headers: dict[str, str]) -> None:
    async with edge(byte_tokenizer_directory) as (_, _, session):
        async with session.post("/page/flush") as answer:
            assert answer.status == 200
        async with session.post("/page/flush", headers=headers) as answer:
            assert answer.status == 403


async def test_the_files_need_no_key_and_are_cached(byte_tokenizer_directory: Path) -> None:
    async with edge(byte_tokenizer_directory, KEYRING) as (_, _, session):
        async with session.get("/") as answer:
            assert answer.status == 200
            assert "<!doctype html>" in await answer.text()
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            tag = answer.headers["ETag"]
        async with session.get("/static/index.html", headers={"If-None-Match": tag}) as answer:
            assert answer.status == 304
        for path in ("/", "/page/info"):
            async with session.head(path) as answer:
                assert (answer.status, await answer.read()) == (200, b"")
        async with session.get("/static/../files.py", headers=ADMIN) as answer:
            assert answer.status == 404


def test_the_vendored_files_are_those_that_their_readme_names() -> None:
    folder = Path(files.__file__).parent / "static/vendor"
    named = dict(re.findall(r"^\| `([^`]+)`.*`([0-9a-f]{64})`", (folder / "README.md").read_text(), re.MULTILINE))
    assert named == {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.js")}


async def test_without_a_page_nothing_of_it_is_served(byte_tokenizer_directory: Path) -> None:
    async with (
        running("127.0.0.1:1") as one,
        http_edge(one.link, has_page=False) as url,
        aiohttp.ClientSession(url) as session,
    ):
        for path in ("/", "/static/index.html", "/page/info", "/page/feed"):
            async with session.get(path) as answer:
                assert answer.status == 404


async def test_more_pages_than_the_limit_are_refused(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_PAGES", 1)
    async with edge(byte_tokenizer_directory) as (one, _, session), opened(session) as page:
        await page.read()
        async with session.get("/page/feed") as answer:
            assert answer.status == 503
            assert "1 pages show" in (await answer.json())["error"]["message"]
        one.link.feed.end_all()
        while await page.read() is not None:
            pass


async def test_a_slow_page_gets_a_new_snapshot_instead_of_a_long_buffer(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_UNREAD_BYTES", 100)
    async with edge(byte_tokenizer_directory) as (one, _, _):
        with one.link.feed.page("") as page:
            await page.begin()
            assert b'"snapshot":true' in (await page.next() or b"")
            for number in range(5):
                one.link.feed.take(0, b'{"at":%d,"filling":"%s"}' % (number, b"x" * 40))
            assert not page._events
            assert b'"snapshot":true' in (await page.next() or b"")
