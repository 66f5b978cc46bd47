"""The promise of a reader of untrusted headers: a result or a one-sentence error, in memory that fits the file."""

import io
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from pagewire_common.start_error import StartError

Header = TypeVar("Header")

_MADE_UP = 1 << 28
"""Bytes. Imports and other threads are traced too (some of 2^20); a made-up number from a header would take 2^31."""


class _WatchedFile(io.FileIO):
    """Fails if more bytes are read than are left, or any byte twice."""

    def read(self, size: int | None = -1) -> bytes:
        left = Path(str(self.name)).stat().st_size - self.tell()
        assert size is not None
        assert 0 <= size <= left
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        before = self.tell()
        after = super().seek(offset, whence)
        assert after >= before
        return after


def read_untrusted(read: Callable[[Path], Header], content: bytes) -> Header | None:
    """The header of a file with this content, or None if it is refused by a sentence."""
    with tempfile.NamedTemporaryFile() as stream:
        stream.write(content)
        stream.flush()
        sentence = None
        tracemalloc.start()
        try:
            with patch.dict(read.__globals__, open=_WatchedFile):
                header = read(Path(stream.name))
        except StartError as error:
            header, sentence = None, str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < _MADE_UP
    if sentence is not None:
        assert stream.name in sentence
        assert len(sentence.splitlines()) == 1
        assert len(sentence) < 1000
    return header
