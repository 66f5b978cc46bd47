"""Converts a chat to the prompt that the model's chat template writes, with the images of its messages."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.checking.checks import (
    MAX_MESSAGES,
    MAX_PARTS,
    check_characters_of_context,
    check_length,
    invalid,
    require_tokenizer,
    take_token_ids,
)
from scheduler_service.frontend.checking.prompt_builder import PromptBuilder, expand_images, is_sound, require_layouts
from scheduler_service.frontend.checking.prompt_parts import check_combinations
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.rendering.chat_input import ChatInput, Content, RawMessage
from scheduler_service.frontend.rendering.encoding_errors import TemplateError
from scheduler_service.frontend.text.tokenization import Tokenizer

MESSAGES_AT_ONCE = 512
"""Largest number of chat messages that are read in one turn of the event loop."""
ROLES = ("system", "developer", "user", "assistant", "tool")
NamedImage = tuple[str, bytes]
"""The name of an image or a sound in errors, and its file."""


class ChatPrompt(NamedTuple):
    """`end`: the last characters of the rendered chat."""

    built: PromptBuilder
    end: str


async def encode_chat(
    message: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel, most: int, *, aside: bool
) -> ChatPrompt:
    """Raises RequestError, and TooManyTokensError if the chat has more than `most` tokens without images."""
    chat, tokenizer = message.chat, require_tokenizer("chat", model)
    if not tokenizer.has_chat_template:
        invalid("chat is not possible with this model: it has no chat template; use text or token_ids")
    if not chat.messages:
        invalid("chat.messages is empty; at least one message is needed")
    check_length("chat.messages", len(chat.messages), min(MAX_MESSAGES, model.context_length))
    _check_settings(chat, tokenizer)
    messages, images = await _read_messages(chat, tokenizer)
    num_characters = sum(_num_characters(content) for _, content, _ in messages)
    check_characters_of_context("chat", num_characters, model, tokenizer)
    layouts = None
    if images:
        for name, _ in images:
            layouts = require_layouts(name, model)
        if isinstance(message, pb.GenerateRequest):
            check_combinations(message, "sounds" if is_sound(images[0][0]) else "images")
    begins_answer = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    given = ChatInput(
        messages,
        tools=chat.tools,
        documents=chat.documents,
        template_arguments=chat.template_arguments,
        adds_generation_prompt=begins_answer and not chat.continue_final_message,
        continues=chat.continue_final_message,
        parses_special_tokens=message.parse_special_tokens,
        placeholder=tokenizer.token(layouts.placeholder_id) if layouts is not None else "",
        item_type="audio" if images and is_sound(images[0][0]) else "image",
    )
    try:
        token_ids, end = await tokenizer.encode_chat(given, most=most, aside=aside)
    except TemplateError as error:
        invalid(str(error))
    if images:
        return ChatPrompt(await expand_images(token_ids, images, model, is_counted=aside), end)
    built = PromptBuilder(model, "chat")
    built.token_ids = await take_token_ids(token_ids)
    return ChatPrompt(built, end)


def has_images(message: pb.GenerateRequest) -> bool:
    """True if the prompt of the request contains an image or a sound."""
    return any(
        part.HasField("image") or part.HasField("sound")
        for part in (*message.parts.parts, *content_parts(message.chat))
    )


def content_parts(chat: pb.Chat) -> Iterator[pb.ContentPart]:
    for message in chat.messages:
        yield from message.parts


def _check_settings(chat: pb.Chat, tokenizer: Tokenizer) -> None:
    for name in ("tools", "documents"):
        if getattr(chat, name) and not tokenizer.template_names(name):
            invalid(f"chat.{name} is set, and the model's chat template reads no {name}")
    if not chat.continue_final_message:
        return
    if chat.add_generation_prompt:
        invalid(
            "chat.continue_final_message and chat.add_generation_prompt are both true; a prompt cannot end with the "
            "last message and with the beginning of another"
        )
    last = chat.messages[-1]
    if not (last.parts[-1].text if last.parts else last.content).strip():
        invalid("chat.continue_final_message is true, and the last message has no content that could be continued")


async def _read_messages(chat: pb.Chat, tokenizer: Tokenizer) -> tuple[list[RawMessage], list[NamedImage]]:
    """The messages, and their images in order, each with its place in the request."""
    messages: list[RawMessage] = []
    images: list[NamedImage] = []
    knows_developers = tokenizer.template_names("developer")
    for position, message in enumerate(chat.messages):
        role = message.role
        if role not in ROLES:
            invalid(f"chat.messages[{position}].role is {role[:32]!r}; it must be one of {', '.join(ROLES)}")
        if role == "developer" and not knows_developers:
            role = "system"
        content: Content = message.content
        if message.parts:
            content = tuple(_read_parts(f"chat.messages[{position}]", message, images))
        messages.append((role, content, message.fields))
        if len(messages) % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return messages, images


def _read_parts(place: str, message: pb.ChatMessage, images: list[NamedImage]) -> Iterator[str | None]:
    check_length(f"{place}.parts", len(message.parts), MAX_PARTS)
    if message.content:
        invalid(f"{place} has content and parts; set one of the two")
    for number, part in enumerate(message.parts):
        match part.WhichOneof("part"):
            case "text":
                yield part.text
            case "image":
                images.append((f"{place}.parts[{number}].image", part.image.data))
                yield None
            case "sound":
                images.append((f"{place}.parts[{number}].sound", part.sound.data))
                yield None
            case _:
                invalid(f"{place}.parts[{number}] is empty; set one of text, image or sound")


def _num_characters(content: Content) -> int:
    return len(content) if isinstance(content, str) else sum(len(part or "") for part in content)
