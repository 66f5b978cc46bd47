"""Reads a section: the calls between two marks, such as <tool_call> and </tool_call>."""

from collections.abc import Generator

from scheduler_service.frontend.chat.calls.braced_call import BracedCallReader
from scheduler_service.frontend.chat.calls.call_reader import CallReader, Head, Reading
from scheduler_service.frontend.chat.calls.json_object import JsonObjectReader
from scheduler_service.frontend.chat.calls.named_json import NamedJsonReader
from scheduler_service.frontend.chat.calls.python_call import PythonCallReader
from scheduler_service.frontend.chat.calls.tagged import TaggedReader
from scheduler_service.frontend.chat.syntax import BracedCall, CallForm, JsonObject, NamedJson, Section, Tagged
from scheduler_service.frontend.chat.tape import Pause, Reader


class SectionReader:
    def __init__(self, reading: Reading, section: Section, call: CallForm) -> None:
        self._reading, self._tape, self._section = reading, reading.tape, section
        self._call = _call_reader(reading, call)

    def calls(self) -> Reader:
        """Read a section behind its opening mark. Returns whether the section has a call.

        Without a call, no text is consumed. The text behind the last call that cannot belong to the section is not
        consumed either.
        """
        tape, section = self._tape, self._section
        start = tape.hold()
        tape.was_cut = False
        yield from tape.space()
        head = None
        if (yield from tape.literal(section.first)):
            yield from tape.space()
            head = yield from self._call.head()
        if head is None:
            tape.at, tape.was_cut = start, False
            tape.release()
            return False
        while head is not None:
            tape.release()
            if not (yield from self._read(head)):
                return True
            head = None if section.is_single else (yield from self._next())
        yield from self._close()
        return True

    def _read(self, head: Head) -> Reader:
        """Log a call. Returns whether the section goes on."""
        tape, log = self._tape, self._reading.log
        log.start_call(head.tool.name, head.id)
        if tape.was_cut:
            tape.skip_rest()
            is_complete = False
        else:
            is_complete = yield from self._call.arguments(head)
        log.end_call()
        tape.release()
        return is_complete

    def _next(self) -> Generator[None, None, Head | None]:
        """The head of the section's next call; None, with nothing consumed, if no call follows."""
        tape, section = self._tape, self._section
        start = tape.hold()
        yield from tape.space()
        head = None
        if (yield from tape.literal(section.separator)):
            yield from tape.space()
            head = yield from self._call.head()
        if head is None:
            tape.at, tape.was_cut = start, False
        return head

    def _close(self) -> Pause:
        """Consume the end of the section, as far as it is there."""
        tape = self._tape
        for word in (self._section.last, self._section.close):
            start = tape.hold()
            if word:
                yield from tape.space()
                if not (yield from tape.literal(word)):
                    tape.at = len(tape.text) if tape.was_cut else start
        tape.release()


def _call_reader(reading: Reading, call: CallForm) -> CallReader:
    match call:
        case JsonObject():
            return JsonObjectReader(reading, call)
        case NamedJson():
            return NamedJsonReader(reading, call)
        case Tagged():
            return TaggedReader(reading, call)
        case BracedCall():
            return BracedCallReader(reading, call)
        case _:
            return PythonCallReader(reading)
