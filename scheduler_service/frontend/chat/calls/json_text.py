"""Reads a value of JSON as raw text: strings and brackets decide where the value ends, and nothing else is checked."""

import json
import re
from collections.abc import Generator

from scheduler_service.frontend.chat.calls.call_reader import MAX_NAME, Reading
from scheduler_service.frontend.chat.tape import Reader

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


def json_arguments(reading: Reading) -> Reader:
    """Log an object of JSON as arguments. Returns whether the object is complete."""
    tape = reading.tape
    depth, is_string, is_escaped = 0, False, False
    while True:
        text, place = tape.text, tape.at
        while place < len(text):
            if is_escaped:
                place, is_escaped = place + 1, False
                continue
            match = (_INSIDE if is_string else _OUTSIDE).search(text, place)
            place = match.end() if match else len(text)
            found = match.group() if match else ""
            if found == '"':
                is_string = not is_string
            elif found == "\\":
                is_escaped = True
            elif found:
                depth += 1 if found in "{[" else -1
                if depth == 0:
                    break
        reading.log.arguments(text[tape.at : place])
        is_complete = depth == 0 and place > tape.at
        tape.at = place
        if is_complete or tape.is_whole:
            return is_complete
        yield


def json_string(reading: Reading) -> Generator[None, None, str | None]:
    """Consume a short string of JSON, and return its value; None if the text is no such string."""
    tape = reading.tape
    if not (yield from tape.literal('"')):
        return None
    raw = ""
    while True:
        piece = yield from tape.until('"', MAX_NAME - len(raw))
        if piece is None:
            return None
        tape.at += 1
        raw += piece
        if (len(raw) - len(raw.rstrip("\\"))) % 2 == 0:
            break
        raw += '"'
        if len(raw) > MAX_NAME:
            return None
    try:
        value = json.loads(f'"{raw}"')
    except ValueError:
        return None
    return value if isinstance(value, str) else None
