"""The engine's frames for the pages that browsers have open at this front end.

All pages get the same bytes. A page that reads slowly loses its frames, and gets a new snapshot instead. When the
engine is lost, the pages' streams end, and the pages connect again.
"""

import asyncio
from collections import deque

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.link.engine_connection import EngineConnection

MAX_PAGES = 64
MAX_UNREAD_BYTES = 1 << 20
"""Bytes of frames that a page may leave unread, in addition to a snapshot."""


class Feed:
    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._pages: dict[int, PageFeed] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def page(self, authorization: str) -> "PageFeed":
        """A new page's frames. `authorization`: the client's header. Raises UNAVAILABLE at MAX_PAGES."""
        if len(self._pages) >= MAX_PAGES:
            reason = f"{MAX_PAGES} pages show this server's work already; close one, or try again later"
            raise RequestError(grpc.StatusCode.UNAVAILABLE, reason)
        return PageFeed(self._connection, self._pages, authorization)

    def take(self, page: int, data: bytes) -> None:
        """Take a frame of the engine: a snapshot for one page, or with `page` 0 a difference for all pages."""
        event = b"data: " + data + b"\n\n"
        if page:
            if (found := self._pages.get(page)) is not None:
                found.add_snapshot(event)
            return
        for found in self._pages.values():
            found.add(event)

    def end_all(self) -> None:
        """End the streams of all pages that have begun."""
        for page in self._pages.values():
            page.end()


class PageFeed:
    """The frames of one page during a `with` block, as events."""

    def __init__(self, connection: EngineConnection, pages: dict[int, "PageFeed"], authorization: str) -> None:
        self._connection, self._pages, self._authorization = connection, pages, authorization
        self._number = connection.new_number()
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_snapshot = self._has_begun = self._is_over = False
        self._has_some = asyncio.Event()

    def __enter__(self) -> "PageFeed":
        self._pages[self._number] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._pages[self._number]
        self._connection.say(self._number, close_feed={})

    async def begin(self) -> None:
        """Ask the engine for a snapshot. Raises RequestError if the key may not read the feed."""
        await self._connection.ask(self._number, open_feed={"authorization": self._authorization})
        self._has_begun = True

    async def next(self) -> bytes | None:
        """The next events; None at the end."""
        while not self._events:
            if self._is_over:
                return None
            self._has_some.clear()
            if self._has_begun and not self._has_snapshot and self._num_bytes > MAX_UNREAD_BYTES:
                self._num_bytes = 0
                await self.begin()  # for a new snapshot
            await self._has_some.wait()
        events = b"".join(self._events)
        self._events.clear()
        self._num_bytes = 0
        return events

    def add_snapshot(self, event: bytes) -> None:
        self._has_snapshot = True
        self._num_bytes = 0
        self._events.append(event)
        self._has_some.set()

    def add(self, event: bytes) -> None:
        if not self._has_snapshot:
            return
        self._num_bytes += len(event)
        if self._num_bytes > MAX_UNREAD_BYTES:
            self._has_snapshot = False
            self._events.clear()
        else:
            self._events.append(event)
        self._has_some.set()

    def end(self) -> None:
        if self._has_begun:
            self._is_over = True
            self._has_some.set()
