"""Reads messages with headers (harmony): the header's channel says whether the text is reasoning or an answer.

A message for a tool has the tool's name in the header, and its text is the arguments.
"""

import re
from collections.abc import Callable, Generator

from scheduler_service.frontend.chat.calls.call_reader import Reading
from scheduler_service.frontend.chat.tape import Pause, mark_finder

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
PROMPT = f"{START}assistant"
_MAX_HEADER = 512
_HEADER_MARKS = mark_finder(frozenset((MESSAGE, START, *ENDS)))
_BODY_MARKS = mark_finder(frozenset((START, *ENDS)))
_RECIPIENT = re.compile(r"to=functions\.([^\s<]{1,256})")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"([a-z]{1,32})")


class ChannelReader:
    def __init__(self, reading: Reading) -> None:
        self._reading, self._tape = reading, reading.tape

    def messages(self) -> Pause:
        """Read messages up to the end of the text."""
        tape = self._tape
        while (yield from tape.peek()):
            yield from self._message()

    def _message(self) -> Pause:
        tape, log = self._tape, self._reading.log
        header = yield from self._header()
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        tool = self._reading.tools.get(recipient[1]) if recipient and recipient.end() < len(header) else None
        if tool is not None:
            log.start_call(tool.name, None)
            yield from self._body(log.arguments, is_call=True)
            log.end_call()
        elif recipient is None and channel is not None and channel[1] == "analysis":
            yield from self._body(log.reasoning)
        elif not tape.was_cut:
            if not header and (yield from tape.literal(START)):
                log.content(START)
            log.content(header if recipient else "")
            yield from self._body(log.content)

    def _header(self) -> Generator[None, None, str]:
        """Consume a header; "" if the message has none. Of a header that was cut, the rest is consumed."""
        tape = self._tape
        start = tape.hold()
        for opening in (START, CHANNEL, " to=", "to="):
            if (yield from tape.literal(opening)):
                break
        else:
            if tape.was_cut:
                tape.skip_rest()
            tape.release()
            return ""
        behind = tape.at
        while True:
            end, mark = _HEADER_MARKS.find(tape.text, behind, is_whole=tape.is_whole)
            if mark == MESSAGE:
                tape.at = end + len(mark)
                header = tape.text[start : tape.at]
                break
            if mark or end - start > _MAX_HEADER or tape.is_whole:
                tape.was_cut = tape.is_whole and not mark and end - start <= _MAX_HEADER
                header = tape.text[start:] if tape.was_cut else ""
                tape.at = len(tape.text) if tape.was_cut else start
                break
            yield
        tape.release()
        return header

    def _body(self, log: Callable[[str], None], *, is_call: bool = False) -> Pause:
        """Log a message's text, up to the mark of its end. Of a call that was cut, a part of a mark is dropped."""
        tape = self._tape
        while True:
            end, mark = _BODY_MARKS.find(tape.text, tape.at, is_whole=tape.is_whole and not is_call)
            log(tape.text[tape.at : end])
            tape.at = end + len(mark) if mark in ENDS else end
            if mark:
                return
            if tape.is_whole:
                tape.skip_rest()
                return
            yield
