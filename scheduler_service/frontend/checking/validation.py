"""Checks a GenerateRequest, converts it to a GenerationRequest, and converts texts and chats to tokens and back."""

import asyncio
from array import array

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_N, MAX_STOP_TOKENS, MAX_STRING
from scheduler_service.core import EncoderInput
from scheduler_service.frontend.checking.checks import (
    check_context,
    check_length,
    check_token_ids,
    invalid,
    require_tokenizer,
    take_token_ids,
)
from scheduler_service.frontend.checking.sampling_validation import check_sampling, read_sampling
from scheduler_service.frontend.checking.sound_features import read_sound
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.text.encoding_errors import TemplateError, TooManyTokensError
from scheduler_service.frontend.text.tokenization import Tokenizer

MAX_REQUEST_ID = 128
MAX_PRIORITY = 1000
MAX_TOKENIZE = 1 << 17
"""Largest number of tokens of a Tokenize call; a longer context of the model takes precedence."""
MAX_DETOKENIZE = 1 << 17
MAX_SEPARATE = 1 << 12
MAX_DETOKENIZED_CHARACTERS = 1_000_000
"""Largest number of characters of a Detokenize answer: 4 MB, which any gRPC client accepts."""
MAX_MESSAGES = 4096
MESSAGES_AT_ONCE = 512
"""Largest number of chat messages that are read in one turn of the event loop."""
ROLES = ("system", "user", "assistant", "tool")


def check_names(message: pb.GenerateRequest | pb.AbortRequest) -> None:
    check_characters("request_id", message.request_id, MAX_REQUEST_ID)
    check_characters("tenant", message.tenant)


def check_characters(name: str, text: str, most: int = MAX_STRING) -> None:
    if len(text) > most:
        invalid(f"{name} has {len(text)} characters; at most {most} are allowed")


def check_sizes(message: pb.GenerateRequest) -> None:
    """Refuse too long lists, before any code iterates over them or counts their bytes."""
    check_characters("lora_name", message.lora_name)
    check_length("chat.messages", len(message.chat.messages), MAX_MESSAGES)
    check_length("resume.outputs", len(message.resume.outputs), MAX_N)
    check_length("sampling.bad_words", len(message.sampling.bad_words), MAX_BAD_WORDS)
    check_length("sampling.stop_token_ids", len(message.sampling.stop_token_ids), MAX_STOP_TOKENS)
    check_length("sampling.logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIASES)
    for name in ("n", "best_of", "beam_width"):
        if (number := getattr(message.sampling, name)) > MAX_N:
            invalid(f"sampling.{name} is {number}; it must be at most {MAX_N}")


def check_place(
    message: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest | pb.TranscribeRequest, model: ServedModel
) -> None:
    check_characters("cache_salt", message.cache_salt)
    if message.priority and not model.has_priorities:
        invalid(f"priority is {message.priority}; this server does not run with --scheduling-policy priority")
    if abs(message.priority) > MAX_PRIORITY:
        invalid(f"priority is {message.priority}; it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")


async def check_request(message: pb.GenerateRequest, request_id: str, model: ServedModel) -> GenerationRequest:
    """Make all checks except those of `check_sizes`, cheap checks first. Raises RequestError."""
    if not model.generates:
        reason = "this model generates no text; use Embed or Score"
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, reason)
    check_place(message, model)
    sampling = message.sampling
    check_sampling(sampling, model)
    encoder_input = await read_encoder_prompt(message, model)
    prompt = await encode_prompt(message, model)
    check_context("the prompt", len(prompt), model)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=await read_sampling(sampling, prompt, model),
        n=(sampling.n or 1) if sampling.best_of > (sampling.n or 1) else None,
        hides_logprobs=not sampling.HasField("logprobs"),
        stop=tuple(sampling.stop) or model.defaults.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        priority=message.priority,
        encoder_input=encoder_input,
        skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
    )


async def encode_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> "array[int]":
    aside = isinstance(message, pb.TokenizeRequest)
    kind = message.WhichOneof("input" if aside else "prompt")
    most = max(model.context_length, MAX_TOKENIZE) if aside else model.context_length
    if message.parse_special_tokens and kind != "text":
        invalid(f"parse_special_tokens needs a prompt of text, and the prompt is {kind or 'none'}")
    if model.max_encoder_len and not aside and kind != "token_ids":
        if kind is not None:
            invalid(f"{kind} cannot be the prompt of this decoder; set encoder_text, or token_ids for the decoder")
        if not model.decoder_start_token_ids:
            invalid("token_ids is missing: the model's files name no start token of its decoder")
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
