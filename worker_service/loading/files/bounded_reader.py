"""Reads numbers and names of a little-endian binary header without reading past the end of the file.

The author of a file may write any length or count. Each length and count is compared with the remaining bytes of the
file before use.
"""

import os
import struct
from typing import BinaryIO

from worker_service.errors import UnsoundFileError

_MAX_NAME = 65_535


class BoundedReader:
    """A reader with a position in a file. Methods raise UnsoundFileError; the argument `what` names the faulty part in
    the message."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.file_bytes = os.fstat(stream.fileno()).st_size
        self.position = 0

    def number(self, kind: str, what: str) -> int:
        """Read a whole number. kind: its type in `struct`'s notation."""
        (number,) = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))
        return int(number)

    def count(self, kind: str, smallest: int, what: str) -> int:
        """Read a number of items, each of at least `smallest` bytes. kind: see `number`."""
        count = self.number(kind, what)
        if count * smallest > self._left:
            raise UnsoundFileError(f"{what} claims {count} entries, for which the {self._left} bytes left have no room")
        return count

    def name(self, what: str) -> str:
        """Read a length, and then a text of this length."""
        length = self.number("Q", what)
        if length > _MAX_NAME:
            raise UnsoundFileError(f"the name of {what} claims {length} bytes; at most {_MAX_NAME} are allowed")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise UnsoundFileError(f"the name of {what} is not UTF-8") from error

    def text(self, limit: int, what: str) -> str:
        """Read a length of at most `limit` bytes, and then a text of this length."""
        length = self.number("Q", what)
        if length > min(limit, self._left):
            self._pass(length, what)
            raise UnsoundFileError(f"{what} is a text of {length} bytes; at most {limit} are read")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise UnsoundFileError(f"{what} is not UTF-8") from error

    def take(self, length: int, what: str) -> bytes:
        """Read the next `length` bytes."""
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
