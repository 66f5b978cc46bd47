"""Reads values of parsed JSON. Every error names the place of the value, such as `messages[3].content`."""

import json
from typing import Any

from scheduler_service.frontend.checking.checks import invalid

MAX_ID_BYTES = 512
"""Largest number of bytes of an id or a name in a message."""


def json_text(place: str, value: Any) -> str:
    """Write a parsed JSON value as text again. Raises RequestError if the text would not be JSON in UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError:
        invalid(f"{place} is nested too deeply")
    except UnicodeEncodeError:
        invalid(f"{place} has one half of a surrogate pair, which is no character")
    except ValueError as error:
        invalid(f"{place} is not valid JSON: {error}")
    return text


def check_keys(place: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a key that is not known, by its name. Raises RequestError."""
    for key, part in value.items():
        if key not in known and part is not None:
            invalid(f"{place}.{shown_key(key)} is no field that this server knows; the fields are {', '.join(known)}")


def read_object(place: str, value: Any) -> dict[str, Any]:
    """The object at a place. Raises RequestError for any other value."""
    if not isinstance(value, dict):
        invalid(f"{place} is {shown(value)}; it must be an object")
    return value


def read_name(place: str, value: Any) -> str:
    """The name or id at a place. Raises RequestError if the text is too long."""
    text = read_text(place, value)
    if (num_bytes := len(text.encode())) > MAX_ID_BYTES:
        invalid(f"{place} has {num_bytes} bytes; at most {MAX_ID_BYTES} are allowed")
    return text


def read_text(place: str, value: Any) -> str:
    """The text at a place. Raises RequestError for any other value."""
    if not isinstance(value, str):
        invalid(f"{place} is {shown(value)}; it must be a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            invalid(f"{place} has one half of a surrogate pair, which is no character")
    return value


def shown_key(key: str) -> str:
    """The name of an object's key in errors."""
    return key[:64].encode(errors="replace").decode()


def shown(value: Any) -> str:
    """A short description of a value for errors."""
    if value is None:
        return "missing"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value[:32] if isinstance(value, str) else value)[:40]
