"""Reads a little-endian binary header of an untrusted file; every length is checked against the bytes left."""

import os
import struct
from typing import BinaryIO

from worker_service.errors import UnsoundFileError

_MAX_NAME = 65_535


class BoundedReader:
    """Reads a file from its start. Methods raise UnsoundFileError; `what` names the faulty part."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.file_bytes = os.fstat(stream.fileno()).st_size
        self.position = 0

    def number(self, kind: str, what: str) -> int:
        """kind: the number's type in the notation of `struct`."""
        (number,) = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))
        return int(number)

    def count(self, kind: str, smallest: int, what: str) -> int:
        """Read a count of items with at least `smallest` bytes each. kind: as for `number`."""
        count = self.number(kind, what)
        if count * smallest > self._left:
            raise UnsoundFileError(f"{what} claims {count} entries, for which the {self._left} bytes left have no room")
        return count

    def name(self, what: str) -> str:
        """Read a length in bytes, then a name in UTF-8."""
        length = self.number("Q", what)
        if length > _MAX_NAME:
            raise UnsoundFileError(f"the name of {what} claims {length} bytes; at most {_MAX_NAME} are allowed")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise UnsoundFileError(f"the name of {what} is not UTF-8") from error

    def text(self, limit: int, what: str) -> str:
        """Read a length of at most `limit` bytes, then a text in UTF-8."""
        length = self.number("Q", what)
        if length > min(limit, self._left):
            self._pass(length, what)
            raise UnsoundFileError(f"{what} is a text of {length} bytes; at most {limit} are read")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise UnsoundFileError(f"{what} is not UTF-8") from error

    def take(self, length: int, what: str) -> bytes:
        self._pass(length, what)
        taken = self._stream.read(length)
        if len(taken) < length:
            raise UnsoundFileError("it became shorter while it was read")
        return taken

    @property
    def _left(self) -> int:
        return self.file_bytes - self.position

    def _pass(self, length: int, what: str) -> None:
        if length > self._left:
            raise UnsoundFileError(f"the file ends inside {what}; it may be incomplete")
        self.position += length
