"""The keys of a generation_config.json and their allowed values. Any other key is refused.

A key that changes which tokens are chosen must not be in the table of ignored keys.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pagewire_common.sampling import MAX_BIAS, MAX_STOP_STRINGS, MAX_STRING, NUMBERS, Bounds, Number

MAX_LISTED = 1024
"""Token ids or words in one list, which the message to the worker contains for each request."""
_LONGEST_WORD = 256
"""Token ids of a banned word."""
_MAX_HEADS = 1024


class Kind(NamedTuple):
    """A key's allowed values. `expected` completes "it must be …". `holds` also receives the vocabulary size."""

    expected: str
    holds: Callable[[Any, int], bool]


def is_token(value: object, vocabulary_size: int) -> bool:
    return type(value) is int and 0 <= value < vocabulary_size


def _are_tokens(value: object, vocabulary_size: int, most: int = MAX_LISTED) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(is_token(token_id, vocabulary_size) for token_id in value)
    )


def _number(bounds: Bounds) -> Kind:
    return Kind(f"a number {bounds}", lambda value, _: type(value) in (int, float) and bounds.hold(value))


def _whole(bounds: Bounds) -> Kind:
    return Kind(f"a whole number {bounds}", lambda value, _: type(value) is int and bounds.hold(value))


def _as_requests(number: Number) -> Kind:
    return _whole(number.bounds) if number.kind is int else _number(number.bounds)


def _one_of(*values: object) -> Kind:
    """Allow exactly these values. Here, true differs from 1, but 1.0 equals 1."""

    def holds(value: object, _: int) -> bool:
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)

    return Kind(" or ".join(["null", *map(repr, values)]) + "; no other value is supported", holds)


def _are_texts(value: object, _: int) -> bool:
    texts = value if isinstance(value, list) else [value]
    return len(texts) <= MAX_STOP_STRINGS and all(
        isinstance(text, str) and 1 <= len(text) <= MAX_STRING for text in texts
    )


def _are_words(value: object, vocabulary_size: int) -> bool:
    return isinstance(value, list) and len(value) <= MAX_LISTED and all(
        word != [] and _are_tokens(word, vocabulary_size, _LONGEST_WORD) for word in value
    )  # fmt: skip


def _are_biases(value: object, vocabulary_size: int) -> bool:
    if not (isinstance(value, list) and len(value) <= MAX_LISTED):
        return False
    found = set()
    for pair in value:
        match pair:
            case [[token_id], int() | float() as bias] if is_token(token_id, vocabulary_size):
                if isinstance(bias, bool) or not -MAX_BIAS <= bias <= MAX_BIAS:
                    return False
                found.add(token_id)
            case _:
                return False
    return len(found) == len(value)


_ANYTHING = Kind("anything", lambda *_: True)
_FLAG = Kind("true or false", lambda value, _: isinstance(value, bool))
TOKEN = Kind("a token id of the model's vocabulary", is_token)
_TOKENS = Kind(f"a list of at most {MAX_LISTED} token ids of the model's vocabulary", _are_tokens)
ENDS = Kind(
    "a token id of the model's vocabulary, or a list of some", lambda value, size: is_token(value, size)
    or _are_tokens(value, size)
)  # fmt: skip
_BY_NAME = Kind(
    "an object of token ids of the model's vocabulary",
    lambda value, size: isinstance(value, dict) and all(is_token(token_id, size) for token_id in value.values()),
)
_TEXT = Kind("a text", lambda value, _: isinstance(value, str))
_FORCED = Kind(
    "a list of pairs of a position and a token id of the model's vocabulary, or null",
    lambda value, size: isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int
        and (pair[1] is None or is_token(pair[1], size)) for pair in value
    ),
)  # fmt: skip

_HEADS = Kind(
    f"a list of at most {_MAX_HEADS} different pairs of a layer and a head, each counted from 0",
    lambda value, _: isinstance(value, list) and len(value) <= _MAX_HEADS and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int and number >= 0 for number in pair)
        for pair in value
    ) and len({*map(tuple, value)}) == len(value),
)  # fmt: skip

_OBEYED: Mapping[str, Kind] = {
    "do_sample": _FLAG,
    **{name: _as_requests(number) for name, number in NUMBERS.items() if number.in_files},
    "top_k": _whole(Bounds(0, 2**31 - 1)),
    "max_new_tokens": _whole(Bounds(1, 2**31 - 1)),
    "max_length": _whole(Bounds(1, math.inf)),
    "min_new_tokens": _whole(Bounds(0, 2**31 - 1)),
    "min_length": _whole(Bounds(0, 2**31 - 1)),
    "eos_token_id": ENDS,
    "decoder_start_token_id": TOKEN,
    "forced_bos_token_id": TOKEN,
    # without effect: the tokenizer decides the first token of a prompt
    "bos_token_id": Kind("a token id", lambda value, _: type(value) is int),
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "bad_words_ids": Kind(
        f"a list of at most {MAX_LISTED} lists of token ids of the model's vocabulary, each of 1 to {_LONGEST_WORD}",
        _are_words,
    ),
    "sequence_bias": Kind(
        f"a list of at most {MAX_LISTED} pairs [[token id], bias], each of another single token of the model's "
        f"vocabulary and a bias in [-{MAX_BIAS}, {MAX_BIAS}]",
        _are_biases,
    ),
    "stop_strings": Kind(
        f"a text, or a list of at most {MAX_STOP_STRINGS}, each of 1 to {MAX_STRING} characters", _are_texts
    ),
}

_FROM_0, _FROM_1 = _whole(Bounds(0, math.inf)), _whole(Bounds(1, math.inf))
CHOSEN_BY_REQUESTS: Mapping[str, tuple[Kind, object]] = {
    "diversity_penalty": (_number(Bounds(0, math.inf)), 0),
    "early_stopping": (
        Kind("true, false or 'never'", lambda value, _: value == "never" or isinstance(value, bool)),
        False,
    ),
    "encoder_no_repeat_ngram_size": (_FROM_0, 0),
    "forced_eos_token_id": (ENDS, None),
    "length_penalty": (_number(Bounds(-1e9, 1e9)), 1),
    "no_repeat_ngram_size": (_FROM_0, 0),
    "num_beam_groups": (_FROM_1, 1),
    "num_beams": (_FROM_1, 1),
    "num_return_sequences": (_FROM_1, 1),
}
"""Keys of the decoding method that the model's author prefers (usually beam search), with their neutral value.

As in vLLM, each request chooses its decoding method. The log reports the unused keys once.
"""

_NEUTRAL: Mapping[str, Kind] = {
    "assistant_ensemble_weight": _one_of(), "constraints": _one_of(), "dola_layers": _one_of(),
    "encoder_repetition_penalty": _one_of(1), "epsilon_cutoff": _one_of(0), "eta_cutoff": _one_of(0),
    "exponential_decay_length_penalty": _one_of(), "force_bos_token_to_be_generated": _one_of(False),
    "force_words_ids": _one_of(), "frequency_penalty": _one_of(0), "guidance_scale": _one_of(1), "max_time": _one_of(),
    "penalty_alpha": _one_of(0), "presence_penalty": _one_of(0),
    "token_healing": _one_of(False), "top_h": _one_of(), "typical_p": _one_of(1), "watermarking_config": _one_of(),
}  # fmt: skip
"""Keys that are allowed only with their neutral value, because pagewire does not implement others."""

_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "they say where the file comes from, and what wrote it": (
        *("_commit_hash", "_from_model_config", "transformers_version", "unsloth_fixed", "unsloth_version"),
    ),
    "they name code, which is never run": ("auto_map", "custom_generate", "custom_pipelines", "trust_remote_code"),
    "they say how transformers computes the same tokens": (
        *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
        *("low_memory", "max_cache_len", "prefill_chunk_size", "use_cache"),
    ),
    "they say how transformers drafts tokens; here --speculation does": (
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "is_assistant"),
        *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp"),
    ),
    "they say what transformers returns besides tokens; here a request does": (
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
    ),
    "no batch is padded": ("pad_token_id",),
    "logits that are not finite fail their request": ("remove_invalid_values",),
    "a softmax is the same with it": ("renormalize_logits",),
}

_OF_TEXT: Mapping[str, Kind] = {
    **_NEUTRAL,
    **_OBEYED,
    **{key: kind for key, (kind, _) in CHOSEN_BY_REQUESTS.items()},
    **{key: _ANYTHING for keys in _LEFT_OUT.values() for key in keys},
}

_OF_SPEECH: Mapping[str, Kind] = {
    "no_timestamps_token_id": TOKEN,
    "max_initial_timestamp_index": _whole(Bounds(0, 2**31 - 1)),
    "lang_to_id": _BY_NAME,
    "task_to_id": _BY_NAME,
    "language": _TEXT,
    "task": _one_of("transcribe"),
    "forced_decoder_ids": _FORCED,
    "alignment_heads": _HEADS,
    "is_multilingual": _ANYTHING,  # without effect: the key lang_to_id lists the languages
    "prev_sot_token_id": _ANYTHING,  # the tokenizer's token <|startofprev|>
    "return_timestamps": _ANYTHING,  # every transcript contains times
}


def kinds(keys: Mapping[str, Any]) -> Mapping[str, Kind]:
    """The allowed values of each key that the file may have. `no_timestamps_token_id` marks a speech model."""
    return {**_OF_TEXT, **_OF_SPEECH} if "no_timestamps_token_id" in keys else _OF_TEXT
