"""Writes answers in pieces, to clients that may read slowly or not at all."""

import asyncio
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager

from aiohttp import web

STALL_SECONDS = 60.0
"""Seconds that a client may leave a piece of its answer unread."""
PIECE_BYTES = 1 << 16
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream of events. The last tells nginx to forward each event at once."""


async def begin_events(request: web.Request) -> web.StreamResponse:
    """Begin a stream of server-sent events."""
    response = web.StreamResponse(headers=EVENTS)
    await response.prepare(request)
    return response


async def begin_lines(request: web.Request) -> web.StreamResponse:
    """Begin a stream of lines of JSON."""
    response = web.StreamResponse(headers=EVENTS | {"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    return response


async def answer_in_parts(
    request: web.Request, whole: bytes, name: bytes, parts: AsyncIterable[bytes | Iterator[bytes]]
) -> web.StreamResponse:
    """Answer with the JSON object `whole`, extended by a list of JSON parts under the key `name`.

    Each part, or each piece of a large part, is created immediately before it is sent.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    before = whole.removesuffix(b"}") + b', "%b": [' % name
    async for part in parts:
        for piece in (part,) if isinstance(part, bytes) else part:
            before += piece
            if len(before) >= PIECE_BYTES:
                await write(response, before)
                await asyncio.sleep(0)  # lets other tasks run
                before = b""
        await write(response, before)
        await asyncio.sleep(0)
        before = b", "
    await write(response, (b"" if before == b", " else before) + b"]}")
    await end(response)
    return response


async def answer_whole(request: web.Request, whole: web.Response) -> web.StreamResponse:
    """Send an answer whose bytes are known. Raises ConnectionResetError as `write`: aiohttp would wait forever."""
    body = whole.body or b""
    assert isinstance(body, bytes)
    response = web.StreamResponse(status=whole.status, headers=whole.headers)
    response.content_length = len(body)
    await response.prepare(request)
    await write(response, b"" if request.method == "HEAD" else body)
    await end(response)
    return response


async def write(response: web.StreamResponse, data: bytes) -> None:
    """Write data. Raises ConnectionResetError if the client reads nothing for STALL_SECONDS."""
    for start in range(0, len(data), PIECE_BYTES):
        with _connection_lost_in_time():
            async with asyncio.timeout(STALL_SECONDS):
                await response.write(data[start : start + PIECE_BYTES])


async def end(response: web.StreamResponse) -> None:
    """End the answer. Raises ConnectionResetError if the client reads nothing for STALL_SECONDS."""
    with _connection_lost_in_time():
        async with asyncio.timeout(STALL_SECONDS):
            await response.write_eof()


@contextmanager
def _connection_lost_in_time() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ConnectionResetError(f"nothing was read for {STALL_SECONDS:g} s") from None
