"""What a reader of headers promises whatever the bytes are: an answer or one sentence, in memory that fits the file."""

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
"""Bytes. Imports and other threads, whose memory is traced too, take some of 2^20; a number made up in a header that
were believed would take 2^31 and more."""


class _WatchedFile(io.FileIO):
    """Fails the assertion if it is asked for more bytes than it has left, or for any byte twice."""

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
    """What `read` makes of a file with this content; None where it refuses it by a sentence."""
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
