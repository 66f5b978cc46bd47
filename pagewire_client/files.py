"""Reads files that a user names, up to a size, because a file such as /dev/zero has no end."""

import sys
from pathlib import Path

MAX_TEXT_BYTES = 16 << 20
"""Bytes of a prompt or a form: the largest gRPC message of a server."""


def read_file(path: Path, most: int) -> bytes:
    """Raises ValueError if the file cannot be read or has more than `most` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most:
        raise ValueError(f"{path} has more than the limit of {most} bytes")
    return data


def read_text(path: Path) -> str:
    """Raises ValueError if the file cannot be read, is too large, or is not UTF-8."""
    return _decoded(read_file(path, MAX_TEXT_BYTES), str(path))


def read_stdin() -> str:
    """Raises ValueError if the text is too large or not UTF-8."""
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"stdin has more than the limit of {MAX_TEXT_BYTES} bytes")
    return _decoded(data, "stdin")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from None
