"""Converts a model's text to events: reasoning, content and calls of the request's tools.

The events do not depend on how the text is cut. Rules:

- Reasoning begins where the prompt or the start of the message opens reasoning, at most once a message.
- A call of an unknown tool, and a text that breaks the family's syntax before the call's arguments, stay content.
- A call whose text breaks the syntax later ends there with the arguments so far; the rest of the text is content.
- A call that was cut has the arguments that the model wrote: raw JSON; in other forms the JSON of all complete parts.
- A part of a mark at the end of a cut call belongs to no text. Elsewhere it is content or reasoning.
- Whitespace next to reasoning and calls is dropped, up to `MAX_HELD_SPACE` characters before a mark.
"""

from collections.abc import Callable, Generator, Iterable, Sequence

from scheduler_service.frontend.chat.calls import channels
from scheduler_service.frontend.chat.calls.call_reader import Reading
from scheduler_service.frontend.chat.calls.channels import ChannelReader
from scheduler_service.frontend.chat.calls.section import SectionReader
from scheduler_service.frontend.chat.events import Event, EventLog
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tape import SPACE, Pause, Reader, Tape, mark_finder
from scheduler_service.frontend.chat.tools import Tool

MAX_HELD_SPACE = 16
"""Characters of whitespace that wait for the next text, because a mark after whitespace drops the whitespace."""


class ChatParser:
    """Parses one message. `prompt_end`: the end of the rendered prompt, which may have opened the reasoning.

    `special_tokens`: texts of special tokens that are dropped outside of calls, if the text is decoded with special
    tokens.
    """

    def __init__(
        self, syntax: ChatSyntax, prompt_end: str, tools: Sequence[Tool], special_tokens: Iterable[str] = ()
    ) -> None:
        self._syntax, self._tape, self._log = syntax, Tape(), EventLog()
        reading = Reading(self._tape, self._log, {tool.name: tool for tool in tools})
        self._section = None
        if tools and syntax.section is not None and syntax.call is not None:
            self._section = SectionReader(reading, syntax.section, syntax.call)
        special = frozenset(filter(None, special_tokens))
        if self._section is None or syntax.section is None:
            self._openings: frozenset[str] = frozenset()
            special -= syntax.marks
        else:
            self._openings = frozenset(syntax.section.opens)
        self._drops = special | frozenset(syntax.drops)
        self._is_thinking = opens_reasoning(syntax, prompt_end)
        if syntax.has_channels:
            self._reader = ChannelReader(reading).messages()
            self._tape.add(prompt_end.rpartition(channels.PROMPT)[2] if channels.PROMPT in prompt_end else "")
        else:
            self._reader = self._message()
        self._run()
        self._log.take()

    def feed(self, text: str) -> list[Event]:
        """The events of more text."""
        if text:
            self._tape.add(text)
            self._run()
        return self._log.take()

    def finish(self) -> list[Event]:
        """The events of the text's end."""
        self._tape.is_whole = True
        self._run()
        return self._log.take()

    def _run(self) -> None:
        next(self._reader, None)

    def _message(self) -> Pause:
        tape, reasoning = self._tape, self._syntax.reasoning
        if reasoning is not None and not self._is_thinking:
            self._is_thinking = yield from self._opens(reasoning.open.strip())
        if reasoning is not None and self._is_thinking:
            yield from tape.skip_all_space()
            yield from self._until(frozenset((reasoning.close,)), self._log.reasoning)
            yield from tape.skip_all_space()
        yield from self._content()

    def _opens(self, mark: str) -> Reader:
        """Consume the mark that opens reasoning, if the message begins with the mark."""
        tape = self._tape
        start = tape.hold()
        yield from tape.space()
        is_open = yield from tape.literal(mark)
        if not is_open:
            tape.at = start
        tape.release()
        return is_open

    def _content(self) -> Pause:
        tape, log, section = self._tape, self._log, self._section
        if section is not None and (yield from self._starts_with_calls(section)):
            yield from tape.skip_all_space()
        while True:
            space, mark = yield from self._until(self._openings, log.content)
            if not mark or section is None:
                return
            if (yield from section.calls()):
                yield from tape.skip_all_space()
            else:
                log.content(space + mark)

    def _starts_with_calls(self, section: SectionReader) -> Reader:
        """Read calls at the start of a message, if the family writes calls there without a mark."""
        starts = self._syntax.section.starts if self._syntax.section else ""
        if not starts:
            return False
        tape = self._tape
        start = tape.hold()
        yield from tape.space()
        if (yield from tape.peek()) == starts and (yield from section.calls()):
            return True
        tape.at = start
        tape.release()
        return False

    def _until(self, stops: frozenset[str], log: Callable[[str], None]) -> Generator[None, None, tuple[str, str]]:
        """Log text up to one of the marks `stops`, and consume the mark; drop the marks of `self._drops`.

        Returns the whitespace before the mark, which is not logged, and the mark; the mark is "" if the text ends.
        """
        tape, finder = self._tape, mark_finder(stops | self._drops)
        while True:
            end, mark = finder.find(tape.text, tape.at, is_whole=tape.is_whole)
            length = 0
            if mark in stops or (stops and not mark and not tape.is_whole):
                piece = tape.text[max(tape.at, end - MAX_HELD_SPACE) : end]
                length = len(piece) - len(piece.rstrip(SPACE))
            log(tape.text[tape.at : end - length])
            tape.at = end - length
            if mark:
                space = tape.text[tape.at : end]
                tape.at = end + len(mark)
                if mark in stops:
                    return space, mark
            elif tape.is_whole:
                return "", ""
            else:
                yield


def opens_reasoning(syntax: ChatSyntax, prompt_end: str) -> bool:
    """Whether the prompt ends with the mark that opens reasoning."""
    if syntax.has_channels:
        return prompt_end.endswith(f"{channels.CHANNEL}analysis{channels.MESSAGE}")
    return syntax.reasoning is not None and prompt_end.rstrip().endswith(syntax.reasoning.open.strip())


def closes_reasoning(syntax: ChatSyntax, prompt_end: str) -> bool:
    """Whether the prompt ends with the mark that closes reasoning, as chat templates write it when thinking is off."""
    return syntax.reasoning is not None and prompt_end.rstrip().endswith(syntax.reasoning.close.strip())
