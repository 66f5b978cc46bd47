"""Reads calls that are a tool's name, a mark and arguments in JSON, such as get_weather[ARGS]{"city": "Paris"}."""

import re
from collections.abc import Generator

from scheduler_service.frontend.chat.calls.call_reader import MAX_NAME, Head, Reading
from scheduler_service.frontend.chat.calls.json_text import json_arguments
from scheduler_service.frontend.chat.syntax import NamedJson
from scheduler_service.frontend.chat.tape import Reader

_NUMBER = re.compile(r"[0-9]+")


class NamedJsonReader:
    def __init__(self, reading: Reading, form: NamedJson) -> None:
        self._reading, self._tape, self._form = reading, reading.tape, form
        # A name ends at whitespace, or at the first character of what may follow.
        self._stops = " \t\r\n{" + "".join(mark[:1] for mark in (form.before_arguments.strip(), form.id_mark))

    def head(self) -> Generator[None, None, Head | None]:
        tape, form = self._tape, self._form
        if not (yield from tape.literal(form.open)):
            return None
        yield from tape.space()
        has_prefix = yield from tape.literal(form.prefix)
        tool = yield from self._reading.tool(self._stops + (":" if form.is_numbered else ""))
        if tool is None:
            return None
        call_id = None
        if form.is_numbered and (yield from tape.literal(":")):
            number = yield from tape.until(self._stops, MAX_NAME)
            if number is None or not _NUMBER.fullmatch(number):
                return Head(tool) if tape.was_cut else None
            call_id = f"{form.prefix if has_prefix else ''}{tool.name}:{number}"
        if form.id_mark and (yield from tape.literal(form.id_mark)):
            call_id = yield from tape.until(self._stops, MAX_NAME)
            if call_id is None:
                return Head(tool) if tape.was_cut else None
        yield from tape.space()
        for word in form.before_arguments.split():
            if not (yield from tape.literal(word)):
                return Head(tool, call_id) if tape.was_cut else None
            yield from tape.space()
        character = yield from tape.peek()
        return Head(tool, call_id) if character in ("{", "") else None

    def arguments(self, _head: Head, /) -> Reader:
        tape = self._tape
        if (yield from tape.peek()) != "{" or not (yield from json_arguments(self._reading)):
            return False
        start = tape.hold()
        for word in self._form.close.split():
            yield from tape.space()
            if not (yield from tape.literal(word)):
                tape.at = len(tape.text) if tape.was_cut else start
                return False
        return True
