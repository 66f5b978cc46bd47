"""Checks image files before a request is admitted: format and size by their first bytes, then by decoding them.

Decoding runs in a process with limits of CPU time and memory, and once for all requests with the same image.
"""

import asyncio
import hashlib
import weakref
from collections import OrderedDict
from typing import NamedTuple

import grpc

from pagewire_common.calls.errors import RequestError
from pagewire_common.images.head import MAX_BYTES, ImageHead, read_head
from scheduler_service.frontend.images.image_process import SIZE
from scheduler_service.frontend.limited.limited_process import LimitedProcess, LimitedProcesses, LimitError, Limits

NUM_DECODERS = 2
SECONDS, SECONDS_OF_PIXEL = 0.5, 1e-7
"""CPU seconds for decoding an image, and for each of its pixels. Images of `MAX_PIXELS` took 0.2 to 1.1 s."""
MEMORY, MEMORY_OF_PIXEL, MEMORY_OF_BYTE = 64 << 20, 20, 3
"""Data bytes of a decoding process, and those for each pixel and for each byte of the file. The process starts with
12 MiB. Images of `MAX_PIXELS` took 256 MiB (GIF), 320 (JPEG, PNG), 448 (progressive CMYK JPEG) and 610 (lossless WebP
with alpha, rotated)."""
MAX_KEPT = 1 << 14
"""Images whose result is kept, in about 300 bytes each."""


class CheckedImage(NamedTuple):
    """`digest`: SHA-256 of the kind of item and the file. `width`, `height`: pixels after the rotation that EXIF data
    state."""

    digest: bytes
    width: int
    height: int


class ImageChecker:
    def __init__(self) -> None:
        # The size, or the rest of a sentence about an error, least recently used first.
        self._found: OrderedDict[bytes, tuple[int, int] | str] = OrderedDict()
        self._turns: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._decoders = LimitedProcesses(
            NUM_DECODERS, "scheduler_service.frontend.images.image_process", "reads images"
        )

    async def check(self, name: str, data: bytes) -> CheckedImage:
        """Raises RequestError, with the image's name in errors about it."""
        if len(data) > MAX_BYTES:
            raise _invalid(f"{name} has {len(data)} bytes; at most {MAX_BYTES} are allowed")
        try:
            head = read_head(data)
        except ValueError as error:
            raise _invalid(f"{name} {error}") from None
        digest = await asyncio.to_thread(_digest, data)
        turn = self._turns.setdefault(digest, asyncio.Lock())
        # Requests with the same image wait for the first. If its client disconnects, the next one goes on.
        async with turn:
            if (found := self._found.get(digest)) is None:
                try:
                    found = await self._decoders.run(lambda process: _decode(process, data, _limits(head, len(data))))
                except LimitError as limit:  # not remembered, because it also depends on how busy the machine is
                    raise _invalid(f"{name} cannot be decoded: {limit}") from None
            self._keep(digest, found)
        if isinstance(found, str):
            raise _invalid(f"{name} {found}")
        return CheckedImage(digest, *found)

    def _keep(self, digest: bytes, found: tuple[int, int] | str) -> None:
        self._found[digest] = found
        self._found.move_to_end(digest)
        if len(self._found) > MAX_KEPT:
            self._found.popitem(last=False)


def _limits(head: ImageHead, num_bytes: int) -> Limits:
    pixels = head.width * head.height
    memory = MEMORY + MEMORY_OF_PIXEL * pixels + MEMORY_OF_BYTE * num_bytes
    return Limits(SECONDS + SECONDS_OF_PIXEL * pixels, memory)


def _decode(process: LimitedProcess, data: bytes, limits: Limits) -> tuple[int, int] | str:
    """Raises LimitError."""
    reply = process.ask(data, limits)
    if not reply[0]:
        return reply[1:].decode()
    width, height = SIZE.unpack_from(reply, 1)
    return width, height


def _digest(data: bytes) -> bytes:
    digest = hashlib.sha256(b"image ")
    digest.update(data)
    return digest.digest()


def _invalid(reason: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, reason)
