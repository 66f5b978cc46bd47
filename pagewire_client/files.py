"""Reads files that a user names. The size of a file is limited, because a file such as /dev/zero has no end. The text
of every error is a full sentence.
"""

import sys
from pathlib import Path

MAX_TEXT_BYTES = 16 << 20
"""Maximum size of a prompt or a form in bytes. No server accepts a larger gRPC message."""


def read_file(path: Path, most: int) -> bytes:
    """Read a file. Raises ValueError if the file cannot be read or has more than `most` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most:
        raise ValueError(f"{path} has more than {most} bytes, the most that are read")
    return data


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises ValueError if the file cannot be read, is too large, or is not UTF-8."""
    return _decoded(read_file(path, MAX_TEXT_BYTES), str(path))


def read_stdin() -> str:
    """Read stdin to its end. Raises ValueError if the text is too large or not UTF-8."""
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"stdin has more than {MAX_TEXT_BYTES} bytes, the most that are read")
    return _decoded(data, "stdin")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from None
