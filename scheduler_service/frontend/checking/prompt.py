"""Converts a text, chat or list of token ids to the prompt of a decoder or an encoder, and tokens to text."""

import asyncio
from array import array

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.core import EncoderInput
from scheduler_service.frontend.checking.checks import (
    check_context,
    check_length,
    check_token_ids,
    invalid,
    require_tokenizer,
    take_token_ids,
)
from scheduler_service.frontend.checking.sound_features import read_sound
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.encoding_errors import TemplateError, TooManyTokensError
from scheduler_service.frontend.text.tokenization import Tokenizer

MAX_TOKENIZE = 1 << 17
"""Largest number of tokens of a Tokenize call. For a model with a longer context, the context length is the limit."""
MAX_DETOKENIZE = 1 << 17
MAX_SEPARATE = 1 << 12
MAX_DETOKENIZED_CHARACTERS = 1_000_000
"""Largest number of characters of a Detokenize answer, which then has at most 4 MB, a size that any gRPC client
accepts.
"""
MAX_MESSAGES = 4096
MESSAGES_AT_ONCE = 512
"""Largest number of chat messages that are read in one turn of the event loop."""
ROLES = ("system", "user", "assistant", "tool")


async def encode_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> "array[int]":
    """Convert a request's prompt to token ids.

    Raises RequestError if there are none, or for an id outside the vocabulary.
    """
    aside = isinstance(message, pb.TokenizeRequest)
    kind = message.WhichOneof("input" if aside else "prompt")
    most = max(model.context_length, MAX_TOKENIZE) if aside else model.context_length
    if message.parse_special_tokens and kind != "text":
        invalid(f"parse_special_tokens is for text alone, and the prompt is {kind or 'none'}")
    if model.max_encoder_len and not aside and kind != "token_ids":
        if kind is not None:
            invalid(f"{kind} is not what a decoder goes on from; give it as encoder_text, or token_ids for the decoder")
        if not model.decoder_start_token_ids:
            invalid("token_ids is missing: the model's files do not say what its decoder begins with")
        return array("I", model.decoder_start_token_ids)
    try:
        if kind == "token_ids" and isinstance(message, pb.GenerateRequest):
            check_context("token_ids", len(message.token_ids.ids), model)
            prompt = await take_token_ids(message.token_ids.ids)
        elif kind == "text":
            tokenizer = require_tokenizer("text", model)
            text = message.text
            _check_characters("text", len(text), model, tokenizer)
            parse = message.parse_special_tokens
            prompt = await take_token_ids(
                await tokenizer.encode(text, most=most, parse_special_tokens=parse, aside=aside)
            )
        elif kind == "chat":
            prompt = await take_token_ids(await _encode_chat(message.chat, model, most, aside=aside))
        else:
            invalid("prompt is missing: set one of text, token_ids or chat")
        if aside and len(prompt) > most:
            raise TooManyTokensError
    except TooManyTokensError:
        limit = f"at most {most} are returned" if aside else f"the context has {most}"
        invalid(f"{kind} has more than {most} tokens; {limit}")
    if not prompt:
        invalid(f"{kind} is empty; the prompt needs at least one token")
    check_token_ids(kind, prompt, model)  # a tokenizer may have token ids outside the model's vocabulary
    return prompt


async def decode_tokens(message: pb.DetokenizeRequest, model: ServedModel) -> pb.DetokenizeResponse:
    """Answer a Detokenize call. Raises RequestError."""
    check_length("token_ids", len(message.token_ids), MAX_SEPARATE if message.separately else MAX_DETOKENIZE)
    token_ids = await take_token_ids(message.token_ids)
    check_token_ids("token_ids", token_ids, model)
    tokenizer = require_tokenizer("detokenizing", model)
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    if message.separately and message.HasField("skip_special_tokens") and skip:
        invalid("skip_special_tokens is true; with separately each token has its text, special ones too")
    if message.separately:
        return pb.DetokenizeResponse(texts=await tokenizer.decode_each(token_ids))
    text = await tokenizer.decode(token_ids, skip_special_tokens=skip)
    if len(text) > MAX_DETOKENIZED_CHARACTERS:
        invalid(
            f"token_ids mean a text of {len(text)} characters; at most {MAX_DETOKENIZED_CHARACTERS} are returned, "
            "so ask for parts of it"
        )
    return pb.DetokenizeResponse(text=text)


async def _encode_chat(chat: pb.Chat, model: ServedModel, most: int, *, aside: bool) -> list[int]:
    tokenizer = require_tokenizer("chat", model)
    if not tokenizer.has_chat_template:
        invalid("chat is not possible with this model: it has no chat template; use text or token_ids")
    if not chat.messages:
        invalid("chat.messages is empty; at least one message is needed")
    check_length("chat.messages", len(chat.messages), min(MAX_MESSAGES, model.context_length))
    messages: list[dict[str, str]] = []
    for position, message in enumerate(chat.messages):
        if message.role not in ROLES:
            invalid(f"chat.messages[{position}].role is {message.role[:32]!r}; it must be one of {', '.join(ROLES)}")
        messages.append({"role": message.role, "content": message.content})
        if len(messages) % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
    _check_characters("chat", sum(len(message["content"]) for message in messages), model, tokenizer)
    try:
        return await tokenizer.encode_chat(messages, most=most, aside=aside)
    except TemplateError as error:
        invalid(str(error))


def _check_characters(field: str, count: int, model: ServedModel, tokenizer: Tokenizer) -> None:
    """Refuse a text that would exceed the context even if each token were the vocabulary's longest token."""
    most = model.context_length * tokenizer.longest_token
    if count > most:
        invalid(f"{field} has {count} characters; the context of {model.context_length} tokens holds fewer than {most}")


async def read_encoder_prompt(message: pb.GenerateRequest, model: ServedModel) -> EncoderInput | None:
    """Read the encoder's input; None for a model without an encoder. Raises RequestError."""
    kind, most = message.WhichOneof("encoder_prompt"), model.max_encoder_len
    if not most:
        if kind is not None:
            invalid(f"{kind} is for models with an encoder beside the decoder, and {model.name} has none")
        return None
    wanted = "encoder_sound" if model.feature_bytes else "encoder_text or encoder_token_ids"
    if kind is None:
        invalid(f"{wanted} is missing: {model.name} has an encoder, and the prompt is what its decoder goes on from")
    if bool(model.feature_bytes) is not (kind == "encoder_sound"):
        invalid(f"{kind} is not what the encoder of {model.name} reads; set {wanted}")
    if kind == "encoder_sound":
        return await read_sound(message.encoder_sound, model)
    if kind == "encoder_text":
        tokenizer, text = require_tokenizer(kind, model), message.encoder_text
        if len(text) > most * tokenizer.longest_token:
            invalid(f"{kind} has {len(text)} characters; the encoder's {most} tokens hold fewer")
        try:
            token_ids = await take_token_ids(await tokenizer.encode(text, most=most))
        except TooManyTokensError:
            invalid(f"{kind} has more than {most} tokens, which is what the encoder reads")
    else:
        if len(message.encoder_token_ids.ids) > most:
            invalid(f"{kind} has {len(message.encoder_token_ids.ids)} tokens; the encoder reads up to {most}")
        token_ids = await take_token_ids(message.encoder_token_ids.ids)
    if not token_ids:
        invalid(f"{kind} is empty; the encoder needs at least one token")
    if len(token_ids) > most:
        invalid(f"{kind} has {len(token_ids)} tokens; the encoder reads up to {most}")
    check_token_ids(kind, token_ids, model)
    return EncoderInput(num_tokens=len(token_ids), token_ids=token_ids)
