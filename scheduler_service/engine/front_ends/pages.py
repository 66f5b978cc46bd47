"""The feed of the engine's work for pages in browsers, and operators' commands from them.

While a page is open, the engine looks at itself ten times a second, and sends the same frame to every front end with
pages. Without a page there is no observer and no timer.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import structlog

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.engine.calls.calls import Outbox
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.front_ends.fleet_view import counts_now, workers_now
from scheduler_service.view.observer import Frame, Observer

log = structlog.get_logger()

LOOK_SECONDS = 0.1
MAX_LOOK_SECONDS = 1.0
SHARE = 0.01
"""Share of the engine's time that looks may take: after an expensive look, the next is later than LOOK_SECONDS."""
BEAT_SECONDS = 5.0
"""Seconds without a change after which a frame tells pages that they are connected."""
MAX_BACKLOG = 1024
"""Rows and events that a front end has not read, above which it gets no frames but a snapshot later."""


def encoded(frame: Frame) -> bytes:
    return json.dumps(frame, separators=(",", ":")).encode()


class Pages:
    """`commands`: the methods of AdminService by the name of their field in `Administer`, set by the service."""

    def __init__(self, engine: Engine) -> None:
        self.commands: Mapping[str, Callable[[Any, Any], Awaitable[Any]]] = {}
        self._engine = engine
        self._began = time.monotonic()
        self._readers: dict[Outbox, set[int]] = {}  # pages that have a snapshot
        self._newcomers: dict[tuple[Outbox, int], None] = {}
        self._looking: asyncio.Task[None] | None = None
        self._observer: Observer | None = None
        self._commanding: set[asyncio.Task[None]] = set()

    def take(self, outbox: Outbox, event: pb.FrontendEvent) -> None:
        """Take OpenFeed, CloseFeed or Administer of a page, whose number is that of the event's call."""
        if event.HasField("open_feed"):
            outbox.tell(event.call, answer=self.open(outbox, event.call, event.open_feed.authorization))
        elif event.HasField("close_feed"):
            self.close(outbox, event.call)
        else:
            commanding = asyncio.create_task(self._tell_result(outbox, event.call, event.administer))
            self._commanding.add(commanding)
            commanding.add_done_callback(self._commanding.discard)

    async def _tell_result(self, outbox: Outbox, call: int, asked: pb.Administer) -> None:
        outbox.tell(call, answer=await self.administer(asked))

    @property
    def is_open(self) -> bool:
        """Whether any page is open."""
        return bool(self._readers or self._newcomers)

    def open(self, outbox: Outbox, page: int, authorization: str) -> pb.Answer:
        """Send a page a snapshot soon, and then all frames. Refuses API keys that may not administer."""
        try:
            self._check(authorization)
        except RequestError as error:
            return _refusal(error)
        self._newcomers[outbox, page] = None
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return pb.Answer()

    def close(self, outbox: Outbox, page: int) -> None:
        self._newcomers.pop((outbox, page), None)
        if (pages := self._readers.get(outbox)) is not None:
            pages.discard(page)
            if not pages:
                del self._readers[outbox]
        self._end_without_pages()

    def leave(self, outbox: Outbox) -> None:
        """A front end is gone, with its pages."""
        self._readers.pop(outbox, None)
        self._newcomers = {place: None for place in self._newcomers if place[0] is not outbox}
        self._end_without_pages()

    def _end_without_pages(self) -> None:
        if not self.is_open and self._looking is not None:
            self._looking.cancel()
            self._looking = None
            self._end_observer()

    def _end_observer(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    async def _look(self) -> None:
        """Look until cancelled. After an error, all pages get new snapshots."""
        while True:
            self._observer = Observer(self._began)
            try:
                await self._look_with(self._observer)
            except Exception:
                log.exception("the feed of the page failed")
            self._end_observer()
            for outbox, pages in self._readers.items():
                self._newcomers |= dict.fromkeys((outbox, page) for page in pages)
            self._readers.clear()
            await asyncio.sleep(MAX_LOOK_SECONDS)

    async def _look_with(self, observer: Observer) -> None:
        told_at = snapshot_due = 0.0
        while True:
            began = time.perf_counter()
            engine, now = self._engine, time.monotonic()
            frame = observer.look(now, workers_now(engine), engine.requests.waiting, counts_now(engine))
            if len(frame) > 1 or now - told_at >= BEAT_SECONDS:
                told_at = now
                self._tell(encoded(frame))
            looked = time.perf_counter()
            if self._newcomers and now >= snapshot_due:
                self._welcome(encoded(observer.snapshot()))
                snapshot_due = now + (time.perf_counter() - looked) / SHARE
            pause = (looked - began) / SHARE
            await asyncio.sleep(min(max(pause, LOOK_SECONDS), MAX_LOOK_SECONDS))

    def _tell(self, data: bytes) -> None:
        for outbox in list(self._readers):
            if len(outbox) > MAX_BACKLOG:
                self._newcomers |= dict.fromkeys((outbox, page) for page in self._readers.pop(outbox))
            else:
                outbox.tell(0, feed=pb.FeedFrame(data=data))

    def _welcome(self, data: bytes) -> None:
        newcomers, self._newcomers = self._newcomers, {}
        for outbox, page in newcomers:
            if len(outbox) > MAX_BACKLOG:
                self._newcomers[outbox, page] = None
                continue
            outbox.tell(page, feed=pb.FeedFrame(data=data))
            self._readers.setdefault(outbox, set()).add(page)

    # ---- operators' commands

    async def administer(self, asked: pb.Administer) -> pb.Answer:
        """Run a command. The answer's data is the serialized response."""
        name = asked.WhichOneof("command") or ""
        try:
            self._check(asked.authorization)
            if name == "kill_worker":
                self._kill_worker(asked.kill_worker)
                return pb.Answer()
            if (command := self.commands.get(name)) is None:
                raise RequestError(grpc.StatusCode.UNIMPLEMENTED, "this server has no such command")
            response = await command(getattr(asked, name), None)
        except RequestError as error:
            return _refusal(error)
        except Exception:
            log.exception("a command of the page failed", command=name)
            return _refusal(RequestError(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details"))
        return pb.Answer(data=response.SerializeToString())

    def _kill_worker(self, asked: pb.KillWorker) -> None:
        if (pipe := self._engine.settings.learn_pipe) is None:
            reason = "only `pagewire serve` can kill its worker, and start it again"
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason)
        try:
            os.write(pipe, (b"s" if asked.small_pool else b"w") if asked.HasField("small_pool") else b"k")
        except OSError:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, "`pagewire serve` does not answer") from None

    def _check(self, authorization: str) -> None:
        """Raises UNAUTHENTICATED or PERMISSION_DENIED."""
        if (keyring := self._engine.keyring) is None:
            return
        if not keyring.authenticate([("authorization", authorization)] if authorization else []).admin:
            raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "this API key may not administer")


def _refusal(error: RequestError) -> pb.Answer:
    return pb.Answer(code=error.code.value[0], message=str(error))
