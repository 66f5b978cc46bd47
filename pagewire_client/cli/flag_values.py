"""Parsers for flags and environment variables. An empty variable counts as unset."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire_client.prompts import Image

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
"""Smallest and largest value of a message's integer field, by type."""


def from_environment(name: str) -> str | None:
    return os.environ.get(name) or None


def client_setting(name: str) -> str | None:
    """PAGEWIRE_CLIENT_<NAME>, or in this release still the server's PAGEWIRE_<NAME>."""
    if value := from_environment(f"PAGEWIRE_CLIENT_{name}"):
        return value
    if value := from_environment(f"PAGEWIRE_{name}"):
        sys.stderr.write(
            f"PAGEWIRE_{name} is a server's setting; a client's is now PAGEWIRE_CLIENT_{name}, and the old name goes "
            "with the next release\n"
        )
    return value


def access(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"api_key": arguments.api_key, "tls": arguments.tls}


def take_credentials(arguments: argparse.Namespace) -> None:
    """Set the key and the folder of certificates for a running server. `--tls` precedes the environment."""
    if arguments.tls is None and (text := client_setting("TLS")):
        arguments.tls = folder(text)
    arguments.api_key = client_setting("API_KEY") or ""


def given(text: str) -> str:
    """Raises ArgumentTypeError for an empty text, for example from `--target "$UNSET"`."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def folder(text: str) -> Path:
    """Raises ArgumentTypeError for an empty text, which pathlib would read as the current folder."""
    return Path(given(text))


def image_file(text: str) -> Image:
    """Read an image file before any server is started. Raises ArgumentTypeError."""
    try:
        return Image.read(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """A parser of integers in [least, most]. The parser raises ArgumentTypeError."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # also for thousands of digits
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not in [{least}, {most}]")
        return number

    return parse


def integer_of(message: type[Message], field: str) -> Callable[[str], int]:
    return whole_number(*_INTEGERS[message.DESCRIPTOR.fields_by_name[field].cpp_type])


def seconds(least: float, most: float = float("inf")) -> Callable[[str], float]:
    """A parser of seconds in [least, most]. The parser raises ArgumentTypeError."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds") from None
        if not least <= number <= most:  # the comparison is false for NaN
            raise argparse.ArgumentTypeError(f"{text[:40]} is not in [{least:g}, {most:g}]")
        return number

    return parse
