"""Reads calls in Python, such as get_weather(city="Paris"), with keyword arguments that are literals."""

import json
from collections.abc import Generator

from scheduler_service.frontend.chat.calls.call_reader import MAX_NAME, Head, Reading
from scheduler_service.frontend.chat.calls.literals import LiteralReader
from scheduler_service.frontend.chat.tape import Reader


class PythonCallReader:
    def __init__(self, reading: Reading) -> None:
        self._reading, self._tape = reading, reading.tape
        self._literals = LiteralReader(reading, "")

    def head(self) -> Generator[None, None, Head | None]:
        tape = self._tape
        tool = yield from self._reading.tool("( \t\r\n")
        if tool is None:
            return None
        if not (yield from tape.literal("(")):
            return Head(tool) if tape.was_cut else None
        start = tape.at
        yield from tape.space()
        if (yield from tape.peek()) == ")":
            return Head(tool)
        has_key = (yield from self._key()) is not None
        tape.at = len(tape.text) if tape.was_cut else start
        return Head(tool) if has_key or tape.was_cut else None

    def arguments(self, _head: Head, /) -> Reader:
        tape, log = self._tape, self._reading.log
        before = "{"
        while True:
            start = tape.hold()
            yield from tape.space()
            if (yield from tape.literal(")")):
                log.arguments("{}" if before == "{" else "}")
                return True
            if before != "{":
                has_comma = yield from tape.literal(",")
                yield from tape.space()
                if has_comma and (yield from tape.literal(")")):
                    log.arguments("}")
                    return True
                if not has_comma:
                    tape.at = len(tape.text) if tape.was_cut else start
                    return False
            key = yield from self._key()
            if key is None:
                tape.at = len(tape.text) if tape.was_cut else start
                return False
            tape.release()
            log.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self._literals.value()):
                if tape.was_cut:
                    tape.skip_rest()
                return False
            before = ", "

    def _key(self) -> Generator[None, None, str | None]:
        tape = self._tape
        key = yield from tape.until("= \t\r\n,()'\"[]{}", MAX_NAME)
        if not key:
            return None
        yield from tape.space()
        if not (yield from tape.literal("=")):
            return None
        yield from tape.space()
        return key
