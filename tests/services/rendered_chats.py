"""Renders chats in this process, as a rendering process does, and with transformers."""

import json
import marshal
from functools import cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_service.frontend.rendering.chat_input import ChatInput
from scheduler_service.frontend.rendering.chat_marks import MarkedText, SpecialTokens
from scheduler_service.frontend.rendering.chat_template import ChatTemplate
from scheduler_service.frontend.rendering.encoding_errors import (
    MARKED,
    TEXT,
    TOO_MANY,
    TemplateError,
    TooManyTokensError,
)
from scheduler_service.frontend.rendering.template_renderer import answer

WORDS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>x"]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = SpecialTokens(WORDS)
MAX = 100_000


def chat_of(messages: list[dict[str, Any]], tools: Any = None, arguments: Any = None, **settings: Any) -> ChatInput:
    raw = []
    for message in messages:
        fields = {name: value for name, value in message.items() if name not in ("role", "content")}
        raw.append((message["role"], message["content"], json.dumps(fields) if fields else ""))
    texts = ["" if value is None else json.dumps(value) for value in (tools, arguments)]
    return ChatInput(raw, tools=texts[0], template_arguments=texts[1], **settings)


@cache
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, VARIABLES)


def rendered(source: str, chat: ChatInput, most: int = MAX) -> MarkedText:
    reply = answer(template_of(source), SPECIAL, marshal.dumps((chat.raw(), most, 1)))
    kind, text = reply[:1], reply[1:].decode()
    if kind == MARKED:
        return MarkedText(text[2:], text[0], text[1], WORDS)
    if kind == TOO_MANY:
        raise TooManyTokensError
    if kind != TEXT:
        raise TemplateError(text)
    return MarkedText(text)


def shown(source: str, chat: ChatInput) -> str:
    """The rendered text with its special tokens; each mark is checked to be whole."""
    text = rendered(source, chat)
    pieces = [piece if number is None else piece + WORDS[number] for piece, number in text.pieces()]
    assert "".join(pieces) == (text.shown(text.text) if text.begin else text.text)
    return "".join(pieces)


def expected(source: str, messages: Any, tools: Any = None, begins: bool = True, **more: Any) -> str:
    (text,), _ = render_jinja_template(
        [messages], tools, chat_template=source, add_generation_prompt=begins, **VARIABLES, **more
    )
    return str(text)
