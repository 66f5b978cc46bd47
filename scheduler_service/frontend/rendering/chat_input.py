"""A chat as the front end passes it to a rendering process, which parses the JSON texts (chat_values.py), and the
encoded chat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

END_CHARACTERS = 2000
"""Number of characters at the end of a rendered chat that are kept as text, for example to find an open `<think>`."""

Content = str | tuple[str | None, ...]
"""A text, or parts: texts, and None for an image or a sound."""
RawMessage = tuple[str, Content, str]
"""A message's role, content and further fields; the fields are a JSON text, or empty."""
RawChat = tuple[tuple[RawMessage, ...], str, str, str, bool, bool, bool, str, str]
"""The attributes of a `ChatInput`, in their order, as `marshal` can write them."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ChatInput:
    """A chat's messages, and the settings with which the messages are rendered.

    `tools`, `documents`, `template_arguments`: JSON texts, or empty.
    `continues`: the rendered text ends with the content of the last message.
    `parses_special_tokens`: special tokens that are spelled out in the chat count as special tokens.
    `item_type`: the type of contents that are not text, "image" or "audio".
    `placeholder`: the text of an image or a sound in a content, for chat templates that read only texts.
    """

    messages: Sequence[RawMessage]
    tools: str = ""
    documents: str = ""
    template_arguments: str = ""
    adds_generation_prompt: bool = True
    continues: bool = False
    parses_special_tokens: bool = False
    placeholder: str = ""
    item_type: str = "image"

    def raw(self) -> RawChat:
        return (
            tuple(self.messages),
            self.tools,
            self.documents,
            self.template_arguments,
            self.adds_generation_prompt,
            self.continues,
            self.parses_special_tokens,
            self.placeholder,
            self.item_type,
        )


class EncodedChat(NamedTuple):
    """The token ids of a rendered chat, and the last characters of its text."""

    token_ids: list[int]
    end: str
