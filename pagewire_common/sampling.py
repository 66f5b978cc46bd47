"""The sampling parameters: the table of their values, defaults and readers, which all parts of the system use.

From a field of `SamplerParams`, checks, types, codecs, the flag, the HTTP field and the default in a generation config
are derived. Two protobuf messages repeat each parameter: `SamplingParams` for clients, `GroupSampling` for engine and
workers.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

MAX_N = 128
"""Outputs or beams of one request."""
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100
MAX_BAD_WORDS = 64
MAX_STRING = 256
"""Characters of a stop string, a bad word, or a name."""


class Bounds(NamedTuple):
    """The range of a value, in a request and in a model's file."""

    low: float
    high: float
    excludes_low: bool = False

    def hold(self, value: float) -> bool:
        """Whether the value is finite and in the range, whose `low` is rounded to the 32 bits of messages."""
        low = min(self.low, struct.unpack("f", struct.pack("f", self.low))[0])
        return -math.inf < value < math.inf and low <= value <= self.high and not (self.excludes_low and value == low)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"in {'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"


class Reader(StrEnum):
    """A part of the system that reads a parameter. What only front ends read is not sent to the engine."""

    FRONT_END = "front end"
    ENGINE = "engine"
    WORKER = "worker"


class Parameter(NamedTuple):
    """`values` and `default` are texts for the documentation."""

    values: str
    default: str
    readers: tuple[Reader, ...]
    with_beams: bool = True


class Number(NamedTuple):
    """A plain number, which only the worker's sampler reads. Beam search, which does not sample, refuses it."""

    kind: type[float]
    default: float
    bounds: Bounds
    help: str
    in_files: bool
    """Whether a model's generation config may set the default."""
    edits_logits: bool
    """Whether the number changes logits before temperature and filters."""


def _number(default: float, bounds: Bounds, text: str, *, in_files: bool = False, edits_logits: bool = False) -> Any:
    more = {"bounds": bounds, "help": text, "in_files": in_files, "edits_logits": edits_logits}
    return field(default=default, metadata=more)


@dataclass(frozen=True, kw_only=True)
class SamplerParams:
    """The numbers with which a worker's sampler chooses tokens; with the defaults, the likeliest token."""

    temperature: float = _number(
        0.0, Bounds(0, 100), "0 takes the likeliest token (default: the model's)", in_files=True
    )
    top_k: int = _number(0, Bounds(0, 2**32 - 1), "sample among this many likeliest tokens; 0 for all", in_files=True)
    top_p: float = _number(
        1.0, Bounds(0, 1, excludes_low=True), "sample among the fewest tokens whose probabilities reach this",
        in_files=True,
    )  # fmt: skip
    min_p: float = _number(
        0.0, Bounds(0, 1), "drop tokens below this times the likeliest token's probability", in_files=True
    )
    presence_penalty: float = _number(
        0.0, Bounds(-2, 2), "subtracted from the logit of every token already generated", edits_logits=True
    )
    frequency_penalty: float = _number(
        0.0, Bounds(-2, 2), "subtracted for each time a token was generated", edits_logits=True
    )
    repetition_penalty: float = _number(
        1.0, Bounds(0.01, 10), "divides positive and multiplies negative logits of tokens in the prompt or output",
        in_files=True, edits_logits=True,
    )  # fmt: skip


NUMBERS: Mapping[str, Number] = {
    one.name: Number(one.type, one.default, **one.metadata)  # type: ignore[arg-type]
    for one in fields(SamplerParams)
}
LOGIT_EDITS: Mapping[str, float] = {name: number.default for name, number in NUMBERS.items() if number.edits_logits}
"""The numbers that change logits, with their neutral values."""

LENGTH_PENALTY = Bounds(-10, 10)

_FRONT_END, _ENGINE, _WORKER = (Reader.FRONT_END,), (Reader.ENGINE,), (Reader.WORKER,)
_BOTH = (*_ENGINE, *_WORKER)
_OUTPUTS = f"{MAX_N}, and at most the sequences of a step"
_LOGPROBS = Parameter(f"{Bounds(0, MAX_LOGPROBS)}", "none", _BOTH, with_beams=False)
_TEXTS = f"each of 1 to {MAX_STRING} characters"
_FORM = Parameter("at most 64 KiB", "no form", _WORKER, with_beams=False)


def _row(number: Number) -> Parameter:
    low, high, _ = number.bounds
    values = f"{low:,} to {high:,}" if number.kind is int else f"{number.bounds}"
    default = f"{number.default:g}"
    return Parameter(values, f"the model's, else {default}" if number.in_files else default, _WORKER, False)


PARAMETERS: Mapping[str, Parameter] = {
    "n": Parameter(f"1 to {_OUTPUTS}", "1", (*_FRONT_END, *_ENGINE)),
    "best_of": Parameter(f"`n` to {_OUTPUTS}", "`n`", (*_FRONT_END, *_ENGINE), with_beams=False),
    "beam_width": Parameter(f"`n` to {_OUTPUTS}", "no beam search", _BOTH),
    "max_tokens": Parameter("at least 1", "the model's, else what the context leaves", _ENGINE),
    "min_tokens": Parameter("at most `max_tokens`", "the model's, else 0", _BOTH),
    **{name: _row(number) for name, number in NUMBERS.items()},
    "seed": Parameter("64 bits", "drawn by the server", _WORKER),
    "stop": Parameter(f"at most {MAX_STOP_STRINGS}, {_TEXTS}", "the model's, else none", _FRONT_END, with_beams=False),
    "stop_token_ids": Parameter(f"at most {MAX_STOP_TOKENS}", "none", _BOTH),
    "ignore_eos": Parameter("true or false", "false", _FRONT_END),
    "include_stop_str_in_output": Parameter("true or false", "false", _FRONT_END),
    "skip_special_tokens": Parameter("true or false", "true", _FRONT_END),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "logit_bias": Parameter(
        f"at most {MAX_LOGIT_BIASES:,}, each in [-{MAX_BIAS}, {MAX_BIAS}]", "the model's, else none", _WORKER, False
    ),
    "allowed_token_ids": Parameter("at most the vocabulary", "all tokens", _BOTH, with_beams=False),
    "bad_words": Parameter(f"at most {MAX_BAD_WORDS}, {_TEXTS}", "the model's, else none", _BOTH, with_beams=False),
    "json_schema": _FORM,
    "regex": _FORM,
    "choice": _FORM._replace(values="at most 1,024, of at most 64 KiB together"),
    "grammar": _FORM,
    "length_penalty": Parameter(f"{LENGTH_PENALTY}", "1", _ENGINE),
    "early_stopping": Parameter("true or false", "false", _ENGINE),
    "strict": Parameter("true or false", "`--undeclared-keys` decides", _FRONT_END, with_beams=False),
}
"""Parameters by field name in the public message."""
