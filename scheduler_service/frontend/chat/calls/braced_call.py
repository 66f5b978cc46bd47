"""Reads calls with arguments in braces, such as call:get_weather{city:<|"|>Paris<|"|>}."""

from collections.abc import Generator

from scheduler_service.frontend.chat.calls.call_reader import Head, Reading
from scheduler_service.frontend.chat.calls.literals import LiteralReader
from scheduler_service.frontend.chat.syntax import BracedCall
from scheduler_service.frontend.chat.tape import Reader


class BracedCallReader:
    def __init__(self, reading: Reading, form: BracedCall) -> None:
        self._reading, self._tape, self._form = reading, reading.tape, form
        self._literals = LiteralReader(reading, form.quote)

    def head(self) -> Generator[None, None, Head | None]:
        tape = self._tape
        if not (yield from tape.literal(self._form.open)):
            return None
        tool = yield from self._reading.tool("{")
        return None if tool is None else Head(tool)

    def arguments(self, _head: Head, /) -> Reader:
        tape = self._tape
        if not (yield from tape.literal("{")):
            return False
        self._reading.log.arguments("{")
        is_complete = yield from self._literals.items("}", 1, is_object=True)
        if tape.was_cut:
            tape.skip_rest()
        return is_complete
