"""Reads calls whose arguments are untyped texts between tags, such as <parameter=city>Paris</parameter>.

Each argument gets the type of the tool's schema. Strings, lists and objects are logged as they come, other
values when they are complete.
"""

import json
from collections.abc import Generator

from scheduler_service.frontend.chat.calls.call_reader import MAX_NAME, Head, Reading
from scheduler_service.frontend.chat.calls.json_text import json_arguments
from scheduler_service.frontend.chat.syntax import Tagged
from scheduler_service.frontend.chat.tape import Reader, mark_finder
from scheduler_service.frontend.chat.tools import is_text, typed_value


class TaggedReader:
    def __init__(self, reading: Reading, form: Tagged) -> None:
        self._reading, self._tape, self._form = reading, reading.tape, form
        self._finder = mark_finder(frozenset((form.value_close,)))
        ends = form.name_end or form.key_open[:1] + form.close[:1]
        self._name_stops = f" \t\r\n{ends[:1] if form.name_end else ends}"

    def head(self) -> Generator[None, None, Head | None]:
        tape, form = self._tape, self._form
        if not (yield from tape.literal(form.open)):
            return None
        yield from tape.space()
        tool = yield from self._reading.tool(self._name_stops)
        if tool is None:
            return None
        if not (yield from tape.literal(form.name_end)):
            return Head(tool) if tape.was_cut else None
        yield from tape.space()
        for mark in (form.key_open, form.close):
            start = tape.at
            if (yield from tape.literal(mark)):
                tape.at = start
                return Head(tool)
        return Head(tool) if tape.was_cut else None

    def arguments(self, head: Head, /) -> Reader:
        tape, form, log = self._tape, self._form, self._reading.log
        before = "{"
        while True:
            start = tape.hold()
            yield from tape.space()
            if (yield from tape.literal(form.close)):
                log.arguments("{}" if before == "{" else "}")
                return True
            key = yield from self._key()
            if key is None:
                tape.at = len(tape.text) if tape.was_cut else start
                return False
            tape.release()
            types = head.tool.types_of(key)
            opening = f"{before}{json.dumps(key, ensure_ascii=False)}: "
            if is_text(types):
                log.arguments(f'{opening}"')
                if not (yield from self._value(None)):
                    return False
                log.arguments('"')
            elif (is_nested := (yield from self._is_nested(types))) or tape.was_cut:
                log.arguments(opening if is_nested else "")
                if not is_nested or not (yield from self._nested()):
                    return False
            else:
                parts: list[str] = []
                if not (yield from self._value(parts)):
                    return False
                log.arguments(opening + typed_value("".join(parts), types))
            before = ", "

    def _key(self) -> Generator[None, None, str | None]:
        tape, form = self._tape, self._form
        if not (yield from tape.literal(form.key_open)):
            return None
        key = yield from tape.until(form.key_end[0], MAX_NAME)
        if key is None or not (yield from tape.literal(form.key_end)):
            return None
        if form.value_open:
            yield from tape.space()
            if not (yield from tape.literal(form.value_open)):
                return None
        if form.has_lines:
            yield from tape.literal("\r")
            yield from tape.literal("\n")
        return key

    def _is_nested(self, types: frozenset[str]) -> Reader:
        """Whether a list or an object of JSON follows, and no text can be meant."""
        if "string" in types:
            return False
        yield from self._tape.space()
        character = yield from self._tape.peek()
        return ("array" if character == "[" else "object" if character == "{" else "") in types

    def _nested(self) -> Reader:
        """Log a list or an object of JSON as it comes: texts in it may contain the mark behind the value."""
        tape = self._tape
        if not (yield from json_arguments(self._reading)):
            return False
        start = tape.hold()
        yield from tape.space()
        is_complete = yield from tape.literal(self._form.value_close)
        if not is_complete:
            tape.at = len(tape.text) if tape.was_cut else start
        tape.release()
        return is_complete

    def _value(self, parts: list[str] | None) -> Reader:
        """Consume a value and the mark behind it, and collect the value in `parts`; without `parts`, log a string.

        If the text ends here, the start of a mark at its end is no part of the value.
        """
        tape = self._tape
        while True:
            end, mark = self._finder.find(tape.text, tape.at, is_whole=False)
            text = tape.text[tape.at : end]
            if self._form.has_lines:
                text = text.removesuffix("\n")  # the line break may belong to the mark
            if parts is None:
                self._reading.log.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                parts.append(text)
            tape.at = end + len(mark) if mark else tape.at + len(text)
            if mark:
                return True
            if tape.is_whole:
                tape.skip_rest()
                return False
            yield
