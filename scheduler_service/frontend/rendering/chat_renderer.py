"""Renders chats with the model's chat template, in processes with limits of time and memory (template_renderer.py).

A chat template is a program by the model's author, and may loop over clients' messages. The limits of time and memory
grow with the size of the messages, so a template of linear cost never comes near its limits. The tokenizer's threads
never wait for the rendering of a template.
"""

import marshal
import re
from collections.abc import Mapping, Sequence

import structlog

from scheduler_service.frontend.limited.limited_process import LimitedProcess, LimitedProcesses, LimitError, Limits
from scheduler_service.frontend.rendering.chat_input import ChatInput
from scheduler_service.frontend.rendering.chat_marks import MarkedText
from scheduler_service.frontend.rendering.encoding_errors import (
    MARKED,
    TEXT,
    TOO_MANY,
    TemplateError,
    TooManyTokensError,
)

log = structlog.get_logger()

NUM_RENDERERS = 2
SECONDS, MAX_SECONDS = 0.3, 10.0
"""CPU seconds: the basic limit for rendering one chat, and the largest limit after the following additions."""
SECONDS_OF_TEMPLATE = 3e-5
"""CPU seconds added to the limit for each character of the template. A new rendering process compiles the template at
2.9 µs a character.
"""
SECONDS_OF_MESSAGE = 2e-4
"""CPU seconds added to the limit for each message. The templates of SmolLM2, TinyLlama and Qwen2.5 take 2.2 to 3.9 µs a
message.
"""
SECONDS_OF_BYTE = 1e-6
"""CPU seconds added to the limit for each byte of the chat. A text that consists of special tokens of 3 characters
takes 0.4 µs a byte. A template's loop over characters takes 0.1 µs a character.
"""
MEMORY, MAX_MEMORY = 128 << 20, 1 << 30
"""Bytes of data: the basic limit of a rendering process, and the largest limit after the addition of `MEMORY_OF_BYTE`.
A rendering process starts with 12 MiB of data. Compiling takes 140 bytes for each character of the template.
"""
MEMORY_OF_BYTE = 48
"""Bytes of memory added to the limit for each byte of the chat. If a message has one character outside the BMP,
Python stores the whole message with 4 bytes a character. Each filter and each `+` of a template copies the message.
"""


class ChatRenderer:
    """Renders chats with the chat template of the model's file `file`.

    `variables`: the texts of special tokens that the template may use, by name (such as `bos_token`).
    `special`: the special tokens that stay text if a chat spells them out.
    """

    def __init__(self, source: str, file: str, variables: Mapping[str, str], special: Sequence[str] = ()) -> None:
        self.source, self.variables = source, variables
        self._file, self._special = file, tuple(special)
        self._words = frozenset(re.findall(r"\w+", source))
        setup = marshal.dumps((source, dict(variables), self._special))
        self._of_prompts, self._aside = (
            LimitedProcesses(number, "scheduler_service.frontend.rendering.template_renderer", "renders chats", setup)
            for number in (NUM_RENDERERS, 1)
        )

    def names(self, word: str) -> bool:
        """Whether the template's source has a word, such as the name of a variable or of a role."""
        return word in self._words

    async def render(self, chat: ChatInput, most: int, longest: int, *, aside: bool = False) -> MarkedText:
        """Render a chat, with marks (chat_marks.py) in place of special tokens.

        Raises TemplateError and RequestError, and TooManyTokensError if the text is longer than `most` tokens of
        `longest` characters each.
        """
        processes = self._aside if aside else self._of_prompts
        return await processes.run(lambda process: self._render(process, chat, most, longest))

    def _render(self, process: LimitedProcess, chat: ChatInput, most: int, longest: int) -> MarkedText:
        # For 1 MB of messages, JSON would hold the GIL for 3 ms; marshal holds the GIL for 0.04 ms.
        message = marshal.dumps((chat.raw(), most, longest))
        limits = self._limits(len(chat.messages), len(message))
        try:
            reply = process.ask(message, limits)
        except LimitError as limit:
            reason = f"{limit} to render"
            log.error(
                "the model's chat template takes too much",
                file=self._file,
                reason=reason,
                messages=len(chat.messages),
                bytes=len(message),
            )
            raise TemplateError(f"the model's chat template cannot be followed for these messages: {reason}") from None
        kind, text = reply[:1], reply[1:].decode()
        if kind == TEXT:
            return MarkedText(text)
        if kind == MARKED:
            return MarkedText(text[2:], text[0], text[1], self._special)
        if kind == TOO_MANY:
            raise TooManyTokensError
        raise TemplateError(text)

    def _limits(self, num_messages: int, num_bytes: int) -> Limits:
        seconds = SECONDS + SECONDS_OF_TEMPLATE * len(self.source)
        seconds += SECONDS_OF_MESSAGE * num_messages + SECONDS_OF_BYTE * num_bytes
        return Limits(min(seconds, MAX_SECONDS), min(MEMORY + MEMORY_OF_BYTE * num_bytes, MAX_MEMORY))
