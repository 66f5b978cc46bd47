"""What a reader of headers promises whatever the bytes are: an answer or one sentence, in memory that fits the file."""

import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pagewire_common.start_error import StartError

Header = TypeVar("Header")


def read_untrusted(read: Callable[[Path], Header], content: bytes) -> Header | None:
    """What `read` makes of a file with this content; None where it refuses it by a sentence."""
    with tempfile.NamedTemporaryFile() as stream:
        stream.write(content)
        stream.flush()
        sentence = None
        tracemalloc.start()
        try:
            header = read(Path(stream.name))
        except StartError as error:
            header, sentence = None, str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < 200_000 + 40 * len(content)
    if sentence is not None:
        assert stream.name in sentence
        assert len(sentence.splitlines()) == 1
        assert len(sentence) < 1000
    return header
