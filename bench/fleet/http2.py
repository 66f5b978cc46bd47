"""A minimal HTTP/2 client (RFC 9113, RFC 7541), with only the frames that a gRPC call requires.

gRPC's own Python client uses about as much CPU time as the server. This client serialises the frames of its calls once,
opens every flow-control window to the maximum, and only splits the received bytes into frames and messages, at a few
microseconds per message.
"""

import asyncio
import struct
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE = 0x4  # the number of this parameter in SETTINGS frames
WIDEST = (1 << 31) - 1
PREFIX = 5
"""Bytes before each gRPC message: the compression flag and the length."""
REFILL = 1 << 29
"""Received bytes after which the connection's flow-control window is enlarged again."""


class ProtocolError(Exception):
    """The server ended a stream or the connection with an error, which is the message."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_headers(path: str) -> bytes:
    """The header block of a gRPC call, encoded without indexing (RFC 7541)."""

    def text(value: str) -> bytes:
        assert len(value) < 127
        return bytes([len(value)]) + value.encode()

    method, scheme = b"\x83", b"\x86"  # The values POST and http, as indices into HPACK's static table.
    block = method + scheme + b"\x04" + text(path) + b"\x01" + text("bench")  # The headers :path and :authority.
    for name, value in (("content-type", "application/grpc"), ("te", "trailers")):
        block += b"\x00" + text(name) + text(value)
    return block


class Connection(asyncio.Protocol):
    """An HTTP/2 connection with any number of server-streaming calls of one gRPC method.

    `ended` is called when a call ends, with the undecoded bytes of its last message and trailers; `failed` when the
    connection is lost. `window` is the number of bytes that the server may send on a call: 0 allows no answer.
    """

    def __init__(
        self,
        path: str,
        ended: "Callable[[Connection, bytes, bytes], None]",
        failed: Callable[[Exception], None],
        window: int = WIDEST,
    ) -> None:
        self.num_messages = 0
        self._headers = call_headers(path)
        self._ended, self._failed = ended, failed
        self._window = window
        self._next_stream = 1
        self._last_messages: dict[int, bytes] = {}
        self._parts: dict[int, bytes] = {}
        self._buffer = bytearray()
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, self._window)
        window = struct.pack(">I", WIDEST - 65_535)
        transport.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window))

    def connection_lost(self, error: Exception | None) -> None:
        self._failed(error or ProtocolError("the server closed a connection"))

    def begin(self, message: bytes) -> None:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        body = b"\0" + struct.pack(">I", len(message)) + message
        self._transport.write(
            frame(HEADERS, END_HEADERS, stream, self._headers) + frame(DATA, END_STREAM, stream, body)
        )

    def widen(self, num_bytes: int) -> None:
        """Allow the server another `num_bytes` bytes on every call."""
        payload = struct.pack(">I", num_bytes)
        self._transport.write(
            b"".join(frame(WINDOW_UPDATE, 0, stream, payload) for stream in range(1, self._next_stream, 2))
        )

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at, size = 0, len(buffer)
        while size - at >= 9:
            length = int.from_bytes(buffer[at : at + 3], "big")
            if size - at - 9 < length:
                break
            begins = at + 9
            at = begins + length
            kind, flags = buffer[begins - 6], buffer[begins - 5]
            stream = int.from_bytes(buffer[begins - 4 : begins], "big")
            if kind == DATA:
                self._take_messages(stream, begins, at)
            elif kind == HEADERS and flags & END_STREAM:
                self._ended(self, self._last_messages.pop(stream, b""), bytes(buffer[begins:at]))
            elif kind == SETTINGS and not flags & ACK:
                self._transport.write(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self._transport.write(frame(PING, ACK, 0, bytes(buffer[begins:at])))
            elif kind in (RST_STREAM, GOAWAY):
                self._failed(ProtocolError(f"the server ended {'a call' if kind == RST_STREAM else 'a connection'}"))
        del buffer[:at]

    def _take_messages(self, stream: int, begins: int, ends: int) -> None:
        self._received += ends - begins
        if self._received > REFILL:
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._received)))
            self._received = 0
        payload = self._parts.pop(stream, b"") + bytes(self._buffer[begins:ends])
        at, size = 0, len(payload)
        while size - at >= PREFIX:
            end = at + PREFIX + int.from_bytes(payload[at + 1 : at + PREFIX], "big")
            if end > size:
                break
            self._last_messages[stream] = payload[at + PREFIX : end]
            self.num_messages += 1
            at = end
        if at < size:  # the rest of the message is in the next frame
            self._parts[stream] = payload[at:]
