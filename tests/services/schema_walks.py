"""Random texts of a JSON schema's grammar, and their validation with exact numbers."""

import decimal
import json
from collections.abc import Iterator
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from pagewire_common.forms import parser_limits
from scheduler_service.frontend.forms.form_compiler import compile_form

TOKENIZER = LLTokenizer("byte")
WEIGHTS = [12.0 if chr(byte) in '",}]:' else 6.0 if chr(byte).isdigit() else 1.0 for byte in range(256)]
"""Most texts end with these: a string that only one of 200 bytes ends is long."""
FEW = {9: 0.1, 10: 0.1, 13: 0.1, 32: 0.1}
MAX_BYTES = 120
EXACT = decimal.Context(prec=1000)


def text_of(schema: Any) -> str:
    """The JSON of a schema, with exact Decimals."""
    if isinstance(schema, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{text_of(value)}" for key, value in schema.items()) + "}"
    if isinstance(schema, list):
        return "[" + ",".join(map(text_of, schema)) + "]"
    return str(schema) if isinstance(schema, Decimal) else json.dumps(schema)


def grammar_of(schema: Any, *, closes_objects: bool = False) -> tuple[str, str]:
    """The grammar, or "" and the reason why there is none."""
    return compile_form("json_schema", [text_of(schema)], closes_objects=closes_objects)


def matcher_of(grammar: str) -> LLMatcher:
    return LLMatcher(TOKENIZER, grammar, log_level=0, limits=parser_limits())


def may_be_written(grammar: str, text: str) -> bool:
    matcher = matcher_of(grammar)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def texts_of(grammar: str, seeds: int) -> Iterator[str]:
    """The texts that end. A text that can neither go on nor end is an error."""
    whole = matcher_of(grammar)
    for seed in range(seeds):
        random, matcher, text = Random(seed), whole.deep_copy(), bytearray()
        while len(text) < MAX_BYTES and not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            may = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
            assert may or matcher.is_accepting(), (grammar, bytes(text), matcher.get_error())
            if matcher.is_accepting() and (not may or random.random() < 0.4):
                break
            byte = random.choices(may, [FEW.get(byte, WEIGHTS[byte]) for byte in may])[0]
            matcher.consume_token(byte)
            text.append(byte)
        if matcher.is_stopped() or matcher.is_accepting():
            yield text.decode()


def _is_number(_: Any, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_integer(checker: Any, value: Any) -> bool:
    return _is_number(checker, value) and (isinstance(value, int) or value == value.to_integral_value(context=EXACT))


def _multiple_of(_: Any, multiple: Any, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if _is_number(_, value) and EXACT.remainder(Decimal(value), Decimal(multiple)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {multiple}")


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {"multipleOf": _multiple_of},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": _is_number, "integer": _is_integer}
    ),
)


def validate(text: str, schema: Any) -> None:
    """Raises ValidationError."""
    schema = json.loads(text_of(schema), parse_float=Decimal)
    _Validator(schema).validate(json.loads(text, parse_float=Decimal))
