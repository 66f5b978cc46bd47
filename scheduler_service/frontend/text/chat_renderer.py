"""Renders chats with the model's chat template, in processes with limits of time and memory (template_renderer.py).

A chat template may loop over clients' messages. The limits grow with the messages, so a template of linear cost stays
far below them.
"""

import marshal
from collections.abc import Mapping, Sequence

import structlog

from scheduler_service.frontend.limited.limited_process import LimitedProcess, LimitedProcesses, LimitError, Limits
from scheduler_service.frontend.text.chat_marks import ChatMarks
from scheduler_service.frontend.text.encoding_errors import TEXT, TOO_MANY, TemplateError, TooManyTokensError

log = structlog.get_logger()

NUM_RENDERERS = 2
MAX_REASON = 1000
"""Largest number of characters of a template's error message."""
SECONDS, MAX_SECONDS = 0.3, 10.0
"""CPU seconds for rendering one chat: the basic limit, and the largest limit after the additions below."""
SECONDS_OF_TEMPLATE = 3e-5
"""CPU seconds added for each character of the template. A new process compiles at 2.9 µs a character."""
SECONDS_OF_MESSAGE = 2e-4
"""CPU seconds added for each message. SmolLM2, TinyLlama and Qwen2.5 take 2.2 to 3.9 µs a message."""
SECONDS_OF_BYTE = 2e-7
"""CPU seconds added for each byte of the messages. A template's loop over characters takes 0.1 µs a character."""
MEMORY, MAX_MEMORY = 128 << 20, 1 << 30
"""Data bytes of a rendering process: the basic limit, and the largest limit with `MEMORY_OF_BYTE`. A process starts
with 12 MiB. Compiling takes 140 bytes for each character of the template.
"""
MEMORY_OF_BYTE = 48
"""Data bytes added for each byte of the messages. Python may store 4 bytes a character, and each filter and each `+`
copies a message.
"""


class ChatRenderer:
    """`variables`: the texts of special tokens that the template may use, by name (such as `bos_token`)."""

    def __init__(self, source: str, file: str, variables: Mapping[str, str]) -> None:
        self.source, self.variables = source, variables
        self._file = file
        setup = marshal.dumps((source, dict(variables)))
        self._of_prompts, self._aside = (
            LimitedProcesses(number, "scheduler_service.frontend.text.template_renderer", "renders chats", setup)
            for number in (NUM_RENDERERS, 1)
        )

    async def render(
        self, messages: Sequence[Mapping[str, str]], marks: ChatMarks, most: int, longest: int, *, aside: bool = False
    ) -> str:
        """Render a chat up to the assistant's turn, with marks (chat_marks.py) in place of special tokens.

        Raises TemplateError, RequestError, and TooManyTokensError above `most` tokens of `longest` characters each.
        """
        processes = self._aside if aside else self._of_prompts
        return await processes.run(lambda process: self._render(process, messages, marks, most, longest))

    def _render(
        self,
        process: LimitedProcess,
        messages: Sequence[Mapping[str, str]],
        marks: ChatMarks,
        most: int,
        longest: int,
    ) -> str:
        hidden = [{**message, "content": marks.hide(message["content"])} for message in messages]
        # For 1 MB of messages, JSON would hold the GIL for 3 ms, marshal for 0.04 ms.
        message = marshal.dumps((hidden, most * max(longest, marks.longest)))
        del hidden
        limits = self._limits(len(messages), len(message))
        try:
            reply = process.ask(message, limits)
        except LimitError as limit:
            reason = f"{limit} to render"
            log.error(
                "the model's chat template exceeds a limit",
                file=self._file,
                reason=reason,
                messages=len(messages),
                bytes=len(message),
            )
            raise TemplateError(f"the model's chat template cannot render these messages: {reason}") from None
        kind, text = reply[:1], reply[1:].decode()
        if kind == TEXT:
            return text
        if kind == TOO_MANY:
            raise TooManyTokensError
        text = marks.show(text)
        raise TemplateError(text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…")

    def _limits(self, num_messages: int, num_bytes: int) -> Limits:
        seconds = SECONDS + SECONDS_OF_TEMPLATE * len(self.source)
        seconds += SECONDS_OF_MESSAGE * num_messages + SECONDS_OF_BYTE * num_bytes
        return Limits(min(seconds, MAX_SECONDS), min(MEMORY + MEMORY_OF_BYTE * num_bytes, MAX_MEMORY))
