"""Checks a request's sampling parameters against the model's limits, and fills in defaults."""

import asyncio
import math
import secrets
from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Any

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.model_files.generation_config import GenerationDefaults
from pagewire_common.sampling import (
    LENGTH_PENALTY,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STRING,
    NUMBERS,
    PARAMETERS,
    Bounds,
)
from scheduler_service.core import TranscriptParams
from scheduler_service.frontend.checking.checks import (
    IDS_AT_ONCE,
    check_length,
    check_token_ids,
    invalid,
    require_tokenizer,
    take_token_ids,
)
from scheduler_service.frontend.forms.forms import FormError
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import NOTHING_ALLOWED
from scheduler_service.wire.sampling import RequestSampling

# Lower positive temperatures are raised to this value: outputs stay the same, and logits cannot overflow.
MIN_TEMPERATURE = 0.01


async def read_sampling(
    sampling: pb.SamplingParams,
    prompt: Sequence[int],
    model: ServedModel,
    grammar: str = "",
    *,
    fits_max_tokens: bool = False,
) -> RequestSampling:
    """Check the sampling parameters that depend on the prompt, and fill in defaults. Call `check_sampling` first.

    `grammar`: a compiled output form, in place of the form in `sampling`. `fits_max_tokens`: a number of tokens beyond
    the context is lowered.
    """
    max_tokens = _max_tokens(sampling, len(prompt), model, fits=fits_max_tokens)
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
    form = grammar
    if not form and sampling.WhichOneof("constraint"):
        form = await _read_form(sampling, model)
    ends = _ends(sampling, model, len(prompt), max_tokens)
    checked = _sampling_params(sampling, model, ends, bad_words, await _distinct(allowed, model), form)
    if not checked.allows_some(prompt, 0):
        invalid(NOTHING_ALLOWED)
    return checked


def check_sampling(sampling: pb.SamplingParams, model: ServedModel) -> None:
    most_sequences = min(MAX_N, model.max_num_seqs)
    _check_number("n", sampling, 1, most_sequences)
    _check_number("best_of", sampling, sampling.n or 1, most_sequences)
    _check_form(sampling, model)
    _check_beams(sampling, most_sequences, model)
    _check_number("max_tokens", sampling, 1, math.inf)
    for name, number in NUMBERS.items():
        _check_bounds(name, sampling, number.bounds)
    _check_number("logprobs", sampling, 0, min(MAX_LOGPROBS, model.vocabulary_size))
    _check_number("prompt_logprobs", sampling, 0, min(MAX_LOGPROBS, model.vocabulary_size))
    _check_strings("stop", sampling.stop, MAX_STOP_STRINGS)
    _check_strings("bad_words", sampling.bad_words, MAX_BAD_WORDS)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    check_token_ids("sampling.logit_bias", sampling.logit_bias, model)
    check_length("sampling.allowed_token_ids", len(sampling.allowed_token_ids), model.vocabulary_size)
    for token_id, bias in sampling.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:  # also refuses NaN
            invalid(f"sampling.logit_bias[{token_id}] is {bias:g}; it must be in [-{MAX_BIAS}, {MAX_BIAS}]")


def _check_form(sampling: pb.SamplingParams, model: ServedModel) -> None:
    kind = sampling.WhichOneof("constraint")
    if sampling.strict and kind != "json_schema":
        invalid("sampling.strict is for JSON; it needs sampling.json_schema")
    if kind is None:
        return
    if not model.has_forms:
        invalid(
            f"sampling.{kind} is not possible here: workers were started without --forms, or the model has no "
            "tokenizer of bytes or no end-of-sequence token"
        )
    for name in ("beam_width", "ignore_eos"):
        if getattr(sampling, name):
            invalid(f"sampling.{kind} cannot be combined with sampling.{name}")


def _check_beams(sampling: pb.SamplingParams, most_sequences: int, model: ServedModel) -> None:
    if not sampling.HasField("beam_width"):
        for name in ("length_penalty", "early_stopping"):
            if sampling.HasField(name):
                invalid(f"sampling.{name} is for beam search; it needs sampling.beam_width")
        return
    num_ends = len({*model.eos_token_ids, *sampling.stop_token_ids})  # beams need tokens that end no output
    _check_number("beam_width", sampling, sampling.n or 1, min(most_sequences, model.vocabulary_size - num_ends))
    _check_bounds("length_penalty", sampling, LENGTH_PENALTY)
    given = [field.name for field, value in sampling.ListFields() if value and not PARAMETERS[field.name].with_beams]
    if given:
        invalid(f"sampling.{given[0]} cannot be combined with sampling.beam_width")
    if (key := model.defaults.not_with_beams) is not None:
        invalid(f"sampling.beam_width cannot be combined with {key}, which the model's generation config sets")


def _check_number(name: str, sampling: pb.SamplingParams, low: float, high: float) -> None:
    _check_bounds(name, sampling, Bounds(low, high))


def _check_bounds(name: str, sampling: pb.SamplingParams, bounds: Bounds) -> None:
    if sampling.HasField(name) and not bounds.hold(value := getattr(sampling, name)):
        invalid(f"sampling.{name} is {value:g}; it must be {bounds}")


def _check_strings(name: str, strings: Sequence[str], most: int) -> None:
    check_length(f"sampling.{name}", len(strings), most)
    for position, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STRING:
            invalid(
                f"sampling.{name}[{position}] has {len(string)} characters; it must have between 1 and {MAX_STRING}"
            )


async def _read_form(sampling: pb.SamplingParams, model: ServedModel) -> str:
    try:
        return await model.forms.read(sampling, undeclared_keys=model.undeclared_keys)
    except FormError as error:
        invalid(str(error))


async def _distinct(token_ids: "array[int]", model: ServedModel) -> "array[int]":
    """Sort checked token ids and remove repeats. Long lists take several turns of the event loop."""
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


def _max_tokens(sampling: pb.SamplingParams, num_prompt_tokens: int, model: ServedModel, *, fits: bool) -> int:
    room = model.context_length - num_prompt_tokens
    name = max(("n", "best_of", "beam_width"), key=lambda name: getattr(sampling, name))
    if (n := getattr(sampling, name)) > 1:
        # Outputs share only full blocks of the prompt. Without beam search, a block that ends with the prompt is not
        # shared, because each output computes the last prompt token itself. The last token of an output is never stored
        # in the KV cache.
        shared = (num_prompt_tokens - (not sampling.beam_width)) // model.block_size
        blocks_each = (model.pool_tokens // model.block_size - shared) // n
        in_pool = (shared + blocks_each) * model.block_size - model.num_lookahead_slots + 1 - num_prompt_tokens
        if (sampling.max_tokens or 1) > in_pool:
            invalid(
                f"the prompt has {num_prompt_tokens} tokens, sampling.{name} is {n} and sampling.max_tokens "
                f"{sampling.max_tokens or 1}; together they exceed the {model.pool_tokens} tokens of cache "
                "that a request may take"
            )
        room = min(room, in_pool)
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens > room and not fits:
            invalid(
                f"the prompt has {num_prompt_tokens} tokens and sampling.max_tokens is {sampling.max_tokens}; "
                f"together they exceed the context of {model.context_length} tokens"
            )
        max_tokens = min(sampling.max_tokens, room)
    else:
        most = model.defaults.max_tokens(num_prompt_tokens)
        if most is not None and most < 1:
            invalid(
                f"the prompt has {num_prompt_tokens} tokens, and the model's generation config limits prompt and "
                f"output to max_length {model.defaults.max_length} together; set sampling.max_tokens, or send fewer"
            )
        max_tokens = room if most is None else min(room, most)
    if sampling.min_tokens > max_tokens:
        invalid(f"sampling.min_tokens is {sampling.min_tokens}; it must be at most max_tokens ({max_tokens})")
    return max_tokens


def _ends(sampling: pb.SamplingParams, model: ServedModel, num_prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    """The parameters that end outputs. A request's max_tokens lowers a larger min_tokens in the model's files."""
    least = sampling.min_tokens
    if not sampling.HasField("min_tokens"):
        least = min(model.defaults.min_tokens(num_prompt_tokens), max_tokens)
    return {
        "max_tokens": max_tokens,
        "min_tokens": least,
        "eos_token_ids": frozenset() if sampling.ignore_eos else frozenset(model.eos_token_ids),
        "stop_token_ids": frozenset(sampling.stop_token_ids),
    }


def _sampling_params(
    sampling: pb.SamplingParams,
    model: ServedModel,
    ends: dict[str, Any],
    bad_words: tuple[Sequence[int], ...],
    allowed_token_ids: Sequence[int],
    form: str,
) -> RequestSampling:
    def optional(name: str, default: Any) -> Any:
        return getattr(sampling, name) if sampling.HasField(name) else default

    if sampling.beam_width:
        return RequestSampling(
            n=sampling.n or 1,
            beam_width=sampling.beam_width,
            length_penalty=optional("length_penalty", 1.0),
            early_stopping=sampling.early_stopping,
            **ends,
        )
    defaults = model.defaults
    numbers = {name: optional(name, getattr(defaults, name)) for name in NUMBERS}
    if numbers["temperature"]:
        numbers["temperature"] = max(numbers["temperature"], MIN_TEMPERATURE)
    return RequestSampling(
        **numbers,
        n=max(sampling.n, sampling.best_of, 1),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        logprobs=optional("logprobs", 0 if sampling.best_of > (sampling.n or 1) else None),
        prompt_logprobs=optional("prompt_logprobs", None),
        logit_bias=dict(sampling.logit_bias) or defaults.logit_bias,
        allowed_token_ids=allowed_token_ids,
        bad_words=bad_words or defaults.bad_words,
        form=form,
        transcript=_bans(defaults),
        **ends,
    )


def _bans(defaults: GenerationDefaults) -> TranscriptParams | None:
    if not (defaults.suppressed or defaults.begin_suppressed):
        return None
    return TranscriptParams(suppressed=defaults.suppressed, begin_suppressed=defaults.begin_suppressed)
