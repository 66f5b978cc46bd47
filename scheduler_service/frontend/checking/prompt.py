"""Converts a text, chat or list of token ids to the prompt of a decoder or an encoder, and tokens to text."""

from array import array
from typing import NamedTuple

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.core import EncoderInput, PromptItem
from scheduler_service.frontend.checking.chat import encode_chat
from scheduler_service.frontend.checking.checks import (
    check_characters_of_context,
    check_context,
    check_length,
    check_token_ids,
    invalid,
    require_tokenizer,
    take_token_ids,
)
from scheduler_service.frontend.checking.prompt_parts import encode_parts
from scheduler_service.frontend.checking.sound_features import read_sound
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.rendering.encoding_errors import TooManyTokensError

MAX_TOKENIZE = 1 << 17
"""Largest number of tokens of a Tokenize call. For a model with a longer context, the context length is the limit."""
MAX_DETOKENIZE = 1 << 17
MAX_SEPARATE = 1 << 12
MAX_DETOKENIZED_CHARACTERS = 1_000_000
"""Largest number of characters of a Detokenize answer, which then has at most 4 MB, a size that any gRPC client
accepts.
"""


class Prompt(NamedTuple):
    """The token ids of a prompt. `end`: the last characters of a rendered chat; empty for other prompts. `items`: parts
    that are not text."""

    token_ids: "array[int]"
    end: str = ""
    items: tuple[PromptItem, ...] = ()


async def encode_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> Prompt:
    """Convert a request's prompt to token ids.

    Raises RequestError if there are none, or for an id outside the vocabulary.
    """
    end, items = "", tuple[PromptItem, ...]()
    aside = isinstance(message, pb.TokenizeRequest)
    kind = message.WhichOneof("input" if aside else "prompt")
    kept = _num_kept(message)
    most = max(model.context_length, MAX_TOKENIZE) if aside or kept else model.context_length
    if message.parse_special_tokens and kind not in ("text", "chat", "parts"):
        invalid(f"parse_special_tokens is for text and chats, and the prompt is {kind or 'none'}")
    if model.max_encoder_len and not aside and kind != "token_ids":
        if kind is not None:
            invalid(f"{kind} cannot be the prompt of this decoder; set encoder_text, or token_ids for the decoder")
        if not model.decoder_start_token_ids:
            invalid("token_ids is missing: the model's files name no start token of its decoder")
        return Prompt(array("I", model.decoder_start_token_ids))
    try:
        if kind == "token_ids" and isinstance(message, pb.GenerateRequest):
            num_tokens = len(message.token_ids.ids)
            check_context("token_ids", min(num_tokens, kept or num_tokens), model)
            prompt = await take_token_ids(message.token_ids.ids)
        elif kind == "text":
            tokenizer = require_tokenizer("text", model)
            text = message.text
            check_characters_of_context("text", len(text), model, tokenizer)
            parse = message.parse_special_tokens
            prompt = await take_token_ids(
                await tokenizer.encode(text, most=most, parse_special_tokens=parse, aside=aside)
            )
        elif kind == "chat":
            built, end = await encode_chat(message, model, most, aside=aside)
            prompt, items = built.token_ids, tuple(built.items)
        elif kind == "parts" and isinstance(message, pb.GenerateRequest):
            parts = await encode_parts(message, model)
            prompt, items = parts.token_ids, tuple(parts.items)
        else:
            invalid("prompt is missing: set one of text, token_ids, chat or parts")
        if aside and len(prompt) > most:
            raise TooManyTokensError
    except TooManyTokensError:
        limit = f"at most {most} are returned" if aside else f"the context has {most}"
        invalid(f"{kind} has more than {most} tokens; {limit}")
    if not prompt:
        invalid(f"{kind} is empty; the prompt needs at least one token")
    if kept:
        prompt = prompt[-kept:]
    check_token_ids(kind, prompt, model)  # a tokenizer may have token ids outside the model's vocabulary
    return Prompt(prompt, end, items)


def _num_kept(message: pb.GenerateRequest | pb.TokenizeRequest) -> int:
    """The number of tokens at the prompt's end that are kept; 0 for all."""
    if isinstance(message, pb.TokenizeRequest) or not message.HasField("truncate_prompt_tokens"):
        return 0
    if not message.truncate_prompt_tokens:
        invalid("truncate_prompt_tokens is 0; it must be at least 1")
    return message.truncate_prompt_tokens


async def decode_tokens(message: pb.DetokenizeRequest, model: ServedModel) -> pb.DetokenizeResponse:
    """Answer a Detokenize call. Raises RequestError."""
    check_length("token_ids", len(message.token_ids), MAX_SEPARATE if message.separately else MAX_DETOKENIZE)
    token_ids = await take_token_ids(message.token_ids)
    check_token_ids("token_ids", token_ids, model)
    tokenizer = require_tokenizer("detokenizing", model)
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    if message.separately and message.HasField("skip_special_tokens") and skip:
        invalid("skip_special_tokens is true; with separately, special tokens have a text, too")
    if message.separately:
        return pb.DetokenizeResponse(texts=await tokenizer.decode_each(token_ids))
    text = await tokenizer.decode(token_ids, skip_special_tokens=skip)
    if len(text) > MAX_DETOKENIZED_CHARACTERS:
        invalid(
            f"token_ids are a text of {len(text)} characters; at most {MAX_DETOKENIZED_CHARACTERS} are returned, "
            "so send fewer at a time"
        )
    return pb.DetokenizeResponse(text=text)


async def read_encoder_prompt(message: pb.GenerateRequest, model: ServedModel) -> EncoderInput | None:
    """Read the encoder's input; None for a model without an encoder. Raises RequestError."""
    kind, most = message.WhichOneof("encoder_prompt"), model.max_encoder_len
    if not most:
        if kind is not None:
            invalid(f"{kind} is for models with encoder and decoder, and {model.name} has none")
        return None
    wanted = "encoder_sound" if model.feature_bytes else "encoder_text or encoder_token_ids"
    if kind is None:
        invalid(f"{wanted} is missing: {model.name} has an encoder, and the prompt is only for its decoder")
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
