"""From a GenerateRequest to a checked GenerationRequest, or to a status that names the field and its limit."""

import asyncio
import math
import secrets
from array import array
from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, NoReturn

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.errors import RequestError
from scheduler_service.core import SamplingParams
from scheduler_service.core.groups.sampling_params import NOTHING_ALLOWED
from scheduler_service.frontend.generation_defaults import BOUNDS, Bounds
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.request import GenerationRequest
from scheduler_service.frontend.tokenization import TemplateError, Tokenizer, TooManyTokensError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_STRING = 256
MAX_REQUEST_ID = 128
MAX_PRIORITY = 1000
MAX_TOKENIZE = 1 << 17
"""Or as many as the context has."""
MAX_DETOKENIZE = 1 << 17
MAX_DETOKENIZED_CHARACTERS = 1_000_000
"""At most 4 bytes each: a message that any client reads."""
MAX_MESSAGES = 4096
IDS_AT_ONCE = 1 << 13
MESSAGES_AT_ONCE = 512
"""Ids that are checked in one turn of the event loop."""
ROLES = ("system", "user", "assistant", "tool")

# Lower positive temperatures count as this one: dividing logits by less overflows without changing the choice.
MIN_TEMPERATURE = 0.01

# Part of the contract, but not of this server yet.
UNIMPLEMENTED_FIELDS = ("lora_name",)
UNIMPLEMENTED_SAMPLING = ("json_schema", "regex", "choice", "grammar")

# Beam search takes the likeliest continuations of the model's own distribution; nothing may bend it or cut it short.
NOT_WITH_BEAMS = (
    "best_of",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
)
NOT_WITH_BEAMS_REPEATED = ("stop", "logit_bias", "allowed_token_ids", "bad_words")


def invalid(message: str) -> NoReturn:
    raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


def check_names(message: pb.GenerateRequest | pb.AbortRequest) -> None:
    """Raises RequestError for a request_id or tenant that is too long to be carried through every log line."""
    for name, text, most in (
        ("request_id", message.request_id, MAX_REQUEST_ID),
        ("tenant", message.tenant, MAX_STRING),
    ):
        if len(text) > most:
            invalid(f"{name} has {len(text)} characters; at most {most} are allowed")


def check_sizes(message: pb.GenerateRequest) -> None:
    """Raises RequestError for features that no model of this server has, and for too many elements or outputs.

    It is called before any code iterates over lists or counts their bytes, and before there is a model.
    """
    _refuse_unimplemented(message)
    _check_length("chat.messages", len(message.chat.messages), MAX_MESSAGES)
    _check_length("resume.outputs", len(message.resume.outputs), MAX_N)
    _check_length("sampling.bad_words", len(message.sampling.bad_words), MAX_BAD_WORDS)
    _check_length("sampling.stop_token_ids", len(message.sampling.stop_token_ids), MAX_STOP_TOKENS)
    _check_length("sampling.logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIASES)
    for name in ("n", "best_of", "beam_width"):
        if (number := getattr(message.sampling, name)) > MAX_N:
            invalid(f"sampling.{name} is {number}; it must be at most {MAX_N}")


async def check_request(message: pb.GenerateRequest, request_id: str, model: ServedModel) -> GenerationRequest:
    """Check everything else about a request, after `check_sizes`, cheapest first. Raises RequestError."""
    if len(message.cache_salt) > MAX_STRING:
        invalid(f"cache_salt has {len(message.cache_salt)} characters; at most {MAX_STRING} are allowed")
    if message.priority and not model.has_priorities:
        invalid(f"priority is {message.priority}; this server does not run with --policy priority")
    if abs(message.priority) > MAX_PRIORITY:
        invalid(f"priority is {message.priority}; it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    sampling = message.sampling
    _check_sampling(sampling, model)
    prompt = await encode_prompt(message, model)
    _check_context("the prompt", len(prompt), model)
    max_tokens = _max_tokens(sampling, len(prompt), model)
    if sampling.stop:
        require_tokenizer("sampling.stop", model)
    bad_words: tuple[Sequence[int], ...] = ()
    if sampling.bad_words:
        words = await require_tokenizer("sampling.bad_words", model).encode_words(sampling.bad_words)
        bad_words = tuple(array("I", word) for word in words)
    for word in bad_words:
        check_token_ids("sampling.bad_words", word, model)
    allowed = await take_token_ids(sampling.allowed_token_ids)
    check_token_ids("sampling.allowed_token_ids", allowed, model)
    checked = _sampling_params(sampling, model, max_tokens, bad_words, await _distinct(allowed, model))
    if not checked.allows_some(prompt, 0):
        invalid(NOTHING_ALLOWED)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=checked,
        n=(sampling.n or 1) if sampling.best_of > (sampling.n or 1) else None,
        hides_logprobs=not sampling.HasField("logprobs"),
        stop=tuple(sampling.stop),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        priority=message.priority,
        skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
    )


async def encode_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> "array[int]":
    """The prompt's token ids, at least one and all in the vocabulary. Raises RequestError."""
    aside = isinstance(message, pb.TokenizeRequest)
    kind = message.WhichOneof("input" if aside else "prompt")
    most = max(model.context_length, MAX_TOKENIZE) if aside else model.context_length
    try:
        if kind == "token_ids" and isinstance(message, pb.GenerateRequest):
            _check_context("token_ids", len(message.token_ids.ids), model)
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
    check_token_ids(kind, prompt, model)  # a tokenizer may know tokens that the model does not
    return prompt


async def decode_tokens(message: pb.DetokenizeRequest, model: ServedModel) -> str:
    """The text of tokens. Raises RequestError."""
    _check_length("token_ids", len(message.token_ids), MAX_DETOKENIZE)
    token_ids = await take_token_ids(message.token_ids)
    check_token_ids("token_ids", token_ids, model)
    tokenizer = require_tokenizer("detokenizing", model)
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    text = await tokenizer.decode(token_ids, skip_special_tokens=skip)
    if len(text) > MAX_DETOKENIZED_CHARACTERS:
        invalid(
            f"token_ids mean a text of {len(text)} characters; at most {MAX_DETOKENIZED_CHARACTERS} are returned, "
            "so ask for parts of it"
        )
    return text


async def take_token_ids(token_ids: Sequence[int]) -> "array[int]":
    """Token ids of a message or a text. At 50 to 90 ns each that takes too long for one turn of the event loop."""
    taken = array("I")
    for start in range(0, len(token_ids), IDS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        taken.extend(token_ids[start : start + IDS_AT_ONCE])
    return taken


async def _distinct(token_ids: "array[int]", model: ServedModel) -> "array[int]":
    """Token ids that have been checked, in order and once each; sorting many would keep the event loop waiting."""
    if len(token_ids) <= IDS_AT_ONCE:
        return array("I", sorted(set(token_ids)))
    is_there = bytearray(model.vocabulary_size)
    for start in range(0, len(token_ids), IDS_AT_ONCE):
        for token_id in token_ids[start : start + IDS_AT_ONCE]:
            is_there[token_id] = True
        await asyncio.sleep(0)
    distinct = array("I")
    for start in range(0, len(is_there), IDS_AT_ONCE):
        distinct.extend(compress(range(start, len(is_there)), is_there[start : start + IDS_AT_ONCE]))
        await asyncio.sleep(0)
    return distinct


def require_tokenizer(field: str, model: ServedModel) -> Tokenizer:
    """Raises RequestError for a field that is about text, where the model has no tokenizer."""
    if model.tokenizer is None:
        invalid(f"{field} is not possible with this model: it has no tokenizer; use token ids")
    return model.tokenizer


def _check_context(field: str, num_tokens: int, model: ServedModel) -> None:
    if num_tokens >= model.context_length:
        invalid(
            f"{field} has {num_tokens} tokens; the context has {model.context_length}, "
            "and at least one must be left for the output"
        )


def check_token_ids(field: str, token_ids: Collection[int], model: ServedModel) -> None:
    """Raises RequestError for an id that the model has no embedding for; the worker would refuse the whole step."""
    largest = max(token_ids, default=0)
    if largest >= model.vocabulary_size:
        invalid(f"{field} contains {largest}; the vocabulary has {model.vocabulary_size} tokens")


async def _encode_chat(chat: pb.Chat, model: ServedModel, most: int, *, aside: bool) -> list[int]:
    tokenizer = require_tokenizer("chat", model)
    if not tokenizer.has_chat_template:
        invalid("chat is not possible with this model: it has no chat template; use text or token_ids")
    if not chat.messages:
        invalid("chat.messages is empty; at least one message is needed")
    _check_length("chat.messages", len(chat.messages), min(MAX_MESSAGES, model.context_length))
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
    """Refuse what cannot fit before spending time on tokenizing it: no token is longer than the longest one."""
    most = model.context_length * tokenizer.longest_token
    if count > most:
        invalid(f"{field} has {count} characters; the context of {model.context_length} tokens holds fewer than {most}")


def _refuse_unimplemented(message: pb.GenerateRequest) -> None:
    names = [name for name in UNIMPLEMENTED_FIELDS if getattr(message, name)]
    names += [f"sampling.{name}" for name in UNIMPLEMENTED_SAMPLING if message.sampling.HasField(name)]
    if names:
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, f"{names[0]} is not implemented by this server")


def _check_sampling(sampling: pb.SamplingParams, model: ServedModel) -> None:
    most_sequences = min(MAX_N, model.max_num_seqs)
    _check_number("n", sampling, 1, most_sequences)
    _check_number("best_of", sampling, sampling.n or 1, most_sequences)
    _check_beams(sampling, most_sequences, model)
    _check_number("max_tokens", sampling, 1, math.inf)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        _check_bounds(name, sampling, BOUNDS[name])
    _check_number("presence_penalty", sampling, -2, 2)
    _check_number("frequency_penalty", sampling, -2, 2)
    _check_number("logprobs", sampling, 0, min(MAX_LOGPROBS, model.vocabulary_size))
    _check_number("prompt_logprobs", sampling, 0, min(MAX_LOGPROBS, model.vocabulary_size))
    _check_strings("stop", sampling.stop, MAX_STOP_STRINGS)
    _check_strings("bad_words", sampling.bad_words, MAX_BAD_WORDS)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    check_token_ids("sampling.logit_bias", sampling.logit_bias, model)
    _check_length("sampling.allowed_token_ids", len(sampling.allowed_token_ids), model.vocabulary_size)
    for token_id, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:  # also refuses NaN
            invalid(f"sampling.logit_bias[{token_id}] is {bias:g}; it must be in [-100, 100]")


def _check_beams(sampling: pb.SamplingParams, most_sequences: int, model: ServedModel) -> None:
    if not sampling.HasField("beam_width"):
        for name in ("length_penalty", "early_stopping"):
            if sampling.HasField(name):
                invalid(f"sampling.{name} is for beam search; it needs sampling.beam_width")
        return
    num_ends = len({*model.eos_token_ids, *sampling.stop_token_ids})  # each beam needs tokens that are no end
    _check_number("beam_width", sampling, sampling.n or 1, min(most_sequences, model.vocabulary_size - num_ends))
    _check_number("length_penalty", sampling, -10, 10)
    given = [name for name in NOT_WITH_BEAMS if sampling.HasField(name) and getattr(sampling, name)]
    given += [name for name in NOT_WITH_BEAMS_REPEATED if getattr(sampling, name)]
    if given:
        invalid(f"sampling.{given[0]} cannot be combined with sampling.beam_width")


def _check_number(name: str, sampling: pb.SamplingParams, low: float, high: float) -> None:
    _check_bounds(name, sampling, Bounds(low, high))


def _check_bounds(name: str, sampling: pb.SamplingParams, bounds: Bounds) -> None:
    if sampling.HasField(name) and not bounds.hold(value := getattr(sampling, name)):
        invalid(f"sampling.{name} is {value:g}; it must be {bounds}")


def _check_strings(name: str, strings: Sequence[str], most: int) -> None:
    _check_length(f"sampling.{name}", len(strings), most)
    for position, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STRING:
            invalid(
                f"sampling.{name}[{position}] has {len(string)} characters; it must have between 1 and {MAX_STRING}"
            )


def _check_length(name: str, length: int, most: int) -> None:
    if length > most:
        invalid(f"{name} has {length} entries; at most {most} are allowed")


def _max_tokens(sampling: pb.SamplingParams, num_prompt_tokens: int, model: ServedModel) -> int:
    room = model.context_length - num_prompt_tokens
    name = max(("n", "best_of", "beam_width"), key=lambda name: getattr(sampling, name))
    if (n := getattr(sampling, name)) > 1:
        # Full blocks of the prompt are shared, what follows is not; nor is what ends with the prompt, except by beams:
        # every other output computes the last prompt token itself. The last token of an output is never stored.
        shared = (num_prompt_tokens - (not sampling.beam_width)) // model.block_size
        blocks_each = (model.pool_tokens // model.block_size - shared) // n
        in_pool = (shared + blocks_each) * model.block_size + 1 - num_prompt_tokens
        if (sampling.max_tokens or 1) > in_pool:
            invalid(
                f"the prompt has {num_prompt_tokens} tokens, sampling.{name} is {n} and sampling.max_tokens "
                f"{sampling.max_tokens or 1}; together they exceed the {model.pool_tokens} tokens of cache "
                "that a request may take"
            )
        room = min(room, in_pool)
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens > room:
            invalid(
                f"the prompt has {num_prompt_tokens} tokens and sampling.max_tokens is {sampling.max_tokens}; "
                f"together they exceed the context of {model.context_length} tokens"
            )
        max_tokens = sampling.max_tokens
    else:
        max_tokens = min(room, model.defaults.max_new_tokens or room)
    if sampling.min_tokens > max_tokens:
        invalid(f"sampling.min_tokens is {sampling.min_tokens}; it must be at most max_tokens ({max_tokens})")
    return max_tokens


def _sampling_params(
    sampling: pb.SamplingParams,
    model: ServedModel,
    max_tokens: int,
    bad_words: tuple[Sequence[int], ...],
    allowed_token_ids: Sequence[int],
) -> SamplingParams:
    def optional(name: str, default: Any) -> Any:
        return getattr(sampling, name) if sampling.HasField(name) else default

    ends: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": sampling.min_tokens,
        "eos_token_ids": frozenset() if sampling.ignore_eos else frozenset(model.eos_token_ids),
        "stop_token_ids": frozenset(sampling.stop_token_ids),
    }
    if sampling.beam_width:
        return SamplingParams(
            n=sampling.n or 1,
            beam_width=sampling.beam_width,
            length_penalty=optional("length_penalty", 1.0),
            early_stopping=sampling.early_stopping,
            **ends,
        )
    defaults = model.defaults
    given = {
        name: optional(name, getattr(defaults, name)) for name in ("top_k", "top_p", "min_p", "repetition_penalty")
    }
    temperature = optional("temperature", defaults.temperature) or 0.0
    return SamplingParams(
        n=max(sampling.n, sampling.best_of, 1),
        temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        logprobs=optional("logprobs", 0 if sampling.best_of > (sampling.n or 1) else None),
        prompt_logprobs=optional("prompt_logprobs", None),
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=allowed_token_ids,
        bad_words=bad_words,
        **ends,
        **given,
    )
