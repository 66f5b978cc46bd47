"""Reads the answer of a host that may be hostile to one request by HTTP.

Each answer takes little of the event loop's time, which all streams of a front end share. Libraries for clients read
endless interim answers and chunks of one byte as fast as a host sends them: aiohttp 3.14 took all of the event loop's
time, 0.3 s at once."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache

from yarl import URL

CONNECT_SECONDS = 3.0
"""Seconds for a connection to one of a host's addresses, before the next is tried."""
MAX_HEAD = 32 << 10
"""Bytes of an answer before its content, and of a line between chunks."""
MAX_INTERIM = 8
"""Answers before the final one, such as 103 with hints."""
FEW_CHUNKS, SMALL_CHUNK = 1024, 256
"""More than this number of chunks must have this number of bytes on average."""
PIECE = 64 << 10
_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})(?: |$)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;|\r\n)")
_SWITCHING = 101
_ENDED = "the host ended its answer early"


class AnswerError(Exception):
    """Why an answer cannot be read, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Values by name in lower case. Those of a repeated name are joined by commas."""
    _reader: asyncio.StreamReader

    async def content(self) -> AsyncIterator[bytes]:
        """The content in pieces. Raises AnswerError and OSError."""
        coding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked":
                raise AnswerError("the host answers with a Transfer-Encoding other than chunked")
            async for piece in self._chunks():
                yield piece
        elif length is None:
            while piece := await self._reader.read(PIECE):
                yield piece
        elif _LENGTH.fullmatch(length):
            async for piece in self._exactly(int(length)):
                yield piece
        else:
            raise AnswerError("the host answers with an invalid Content-Length")

    async def _exactly(self, length: int) -> AsyncIterator[bytes]:
        while length:
            piece = await self._reader.read(min(length, PIECE))
            if not piece:
                raise AnswerError(_ENDED)
            length -= len(piece)
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        number = size = 0
        while True:
            head = _CHUNK.match(await _until(b"\r\n", self._reader))
            if head is None:
                raise AnswerError("the host answers with invalid chunks")
            length = int(head[1], 16)
            if not length:
                return  # trailers may follow, which are not read
            number, size = number + 1, size + length
            if number > FEW_CHUNKS and size < number * SMALL_CHUNK:
                raise AnswerError("the host answers in too small chunks")
            async for piece in self._exactly(length):
                yield piece
            if await _until(b"\r\n", self._reader) != b"\r\n":
                raise AnswerError("the host answers with invalid chunks")


@asynccontextmanager
async def answer_to(url: URL, addresses: Sequence[str], headers: Mapping[str, str]) -> AsyncIterator[Answer]:
    """The answer to GET. addresses: of the URL's host, at least one. Raises AnswerError and OSError."""
    reader, writer = await _connect(url, addresses)
    try:
        fields = {"Host": url.host_port_subcomponent or "", "User-Agent": "pagewire", "Connection": "close", **headers}
        lines = [f"GET {url.raw_path_qs} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        writer.write("\r\n".join(lines).encode("ascii"))
        for _ in range(1 + MAX_INTERIM):
            status, found = _parse(await _until(b"\r\n\r\n", reader))
            if status >= 200 or status == _SWITCHING:
                yield Answer(status, found, reader)
                return
        raise AnswerError("the host answers with too many interim answers")
    finally:
        writer.transport.abort()


async def _connect(url: URL, addresses: Sequence[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.raw_host, url.port
    secure = await asyncio.to_thread(_tls) if url.scheme == "https" else None
    for address in addresses[:-1]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await _open(address, port, host, secure)
        except OSError:
            continue
    return await _open(addresses[-1], port, host, secure)


async def _open(
    address: str, port: int | None, host: str | None, secure: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = host if secure is not None else None
    return await asyncio.open_connection(address, port, limit=MAX_HEAD, ssl=secure, server_hostname=name)


@cache
def _tls() -> ssl.SSLContext:
    """Reads the system's certificates, which takes 20 ms."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _until(end: bytes, reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(end)
    except asyncio.IncompleteReadError:
        raise AnswerError(_ENDED) from None
    except asyncio.LimitOverrunError:
        raise AnswerError(f"the host answers with a head or a line of more than {MAX_HEAD} bytes") from None


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.removesuffix(b"\r\n\r\n").decode("latin-1").split("\r\n")
    status, headers = _STATUS.match(first), dict[str, str]()
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            status = None
            break
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if status is None:
        raise AnswerError("the host answers with something other than HTTP")
    return int(status[1]), headers
