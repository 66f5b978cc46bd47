"""Reads calls that are objects of JSON, such as {"name": "get_weather", "arguments": {"city": "Paris"}}.

The name precedes the arguments. Other keys have short values, and only an id among them counts.
"""

from collections.abc import Generator

from scheduler_service.frontend.chat.calls.call_reader import Head, Reading
from scheduler_service.frontend.chat.calls.json_text import json_arguments, json_string
from scheduler_service.frontend.chat.syntax import JsonObject
from scheduler_service.frontend.chat.tape import Reader

_MAX_KEYS = 6
_MAX_SCALAR = 64


class JsonObjectReader:
    def __init__(self, reading: Reading, form: JsonObject) -> None:
        self._reading, self._tape, self._form = reading, reading.tape, form

    def head(self) -> Generator[None, None, Head | None]:
        tape, form = self._tape, self._form
        if not (yield from tape.literal("{")):
            return None
        tool = call_id = None
        for _ in range(_MAX_KEYS):
            key = yield from self._key()
            if key is None:
                break
            if key == form.arguments_key:
                is_object = (yield from tape.peek()) == "{"
                if tool is not None and is_object:
                    return Head(tool, call_id)
                break
            value = yield from self._scalar()
            if value is None:
                break
            if key == form.name_key:
                tool = self._reading.tools.get(value)
                if tool is None:
                    return None
            elif key == form.id_key:
                call_id = value
            yield from tape.space()
            if (yield from tape.literal(",")):
                continue
            if tool is not None and (yield from tape.literal("}")):
                return Head(tool, call_id, is_whole=True)
            break
        return Head(tool, call_id) if tool is not None and tape.was_cut else None

    def arguments(self, head: Head, /) -> Reader:
        if head.is_whole:
            self._reading.log.arguments("{}")
            return True
        if not (yield from json_arguments(self._reading)):
            return False
        return (yield from self._end())

    def _end(self) -> Reader:
        tape = self._tape
        start = tape.hold()
        for _ in range(_MAX_KEYS):
            yield from tape.space()
            if (yield from tape.literal("}")):
                return True
            if not (yield from tape.literal(",")):
                break
            if (yield from self._key()) is None or (yield from self._scalar()) is None:
                break
        tape.at = len(tape.text) if tape.was_cut else start
        return False

    def _key(self) -> Generator[None, None, str | None]:
        yield from self._tape.space()
        key = yield from json_string(self._reading)
        if key is None:
            return None
        yield from self._tape.space()
        if not (yield from self._tape.literal(":")):
            return None
        yield from self._tape.space()
        return key

    def _scalar(self) -> Generator[None, None, str | None]:
        """Consume a string, number or word, and return its text."""
        if (yield from self._tape.peek()) == '"':
            return (yield from json_string(self._reading))
        return (yield from self._tape.until(",}", _MAX_SCALAR))
