"""The process that compiles output forms, within limits: a malicious form can take hours and all memory."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pagewire_common.forms import parser_limits
from scheduler_service.frontend.forms.schema_counts import rewrite_counts
from scheduler_service.frontend.forms.schema_grammar import schema_grammar
from scheduler_service.frontend.forms.schema_keys import KeyPatterns, json_escapes
from scheduler_service.frontend.forms.schema_loops import check_ends
from scheduler_service.frontend.forms.schema_numbers import NumberError, rewrite_numbers
from scheduler_service.frontend.forms.schema_objects import close_objects
from scheduler_service.frontend.forms.schema_text import SchemaError, read_schema, write_schema
from scheduler_service.frontend.forms.schema_unions import tag_unions
from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_KEPT = 32 << 20
"""Resident bytes above which the process exits after the current form. It starts with 20 MiB."""
MAX_GRAMMAR = 256 << 10
"""Largest number of characters of a schema's grammar, which grows if objects are closed (schema_objects.py)."""

_JSON_OPTIONS: "JsonCompileOptions" = {
    # Without a limit, small models generate whitespace until the output reaches its maximum length.
    "whitespace_pattern": r"[ \n\r\t]{1,32}",
    # A client's schema may set these two options, which would permit invalid outputs.
    "lenient": False,
    "coerce_one_of": False,
}
_TOKENIZER = LLTokenizer("byte")
"""Tokens are bytes: loading the model's tokenizer would take seconds and most of the process's memory."""
_ONE_OF = (
    'the alternatives of "oneOf" must differ in type, or each must require a key with a "const" of its own; '
    'or use "anyOf"'
)
_OF_THE_MODEL = re.compile(r"special token|token range|token id", re.IGNORECASE)
"""Errors about tokens that a grammar names, which only workers know."""


def compile_form(
    kind: str, texts: Sequence[str], *, closes_objects: bool = False, parts: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Compile a form to a grammar, and test it with the workers' limits. Returns also an error, "" for a valid form.

    `closes_objects`: objects have only keys of the schema, unless it sets `additionalProperties`. `parts`: compiled
    grammars that the form names, as in `@name`. Raises MemoryError or RecursionError.
    """
    try:
        grammar = _schema_grammar(texts[0], closes_objects) if kind == "json_schema" else _grammar(kind, texts)
        if parts:
            grammars = [_grammars(grammar)[0], *(_grammars(part)[0] | {"name": name} for name, part in parts.items())]
            grammar = json.dumps({"grammars": grammars}, ensure_ascii=False)
        matcher = LLMatcher(_TOKENIZER, grammar, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()
        error = matcher.get_error()
        if _OF_THE_MODEL.search(error):
            error = LLMatcher.validate_grammar(grammar, limits=parser_limits())
            error = "" if error.startswith("WARNING") else error
    except (MemoryError, RecursionError):
        raise
    except (AttributeError, KeyError, TypeError):
        return "", "a keyword in it has a value of a wrong type"
    except BaseException as failure:  # a panic in Rust is no `Exception`
        grammar, error = "", str(failure) or type(failure).__name__
    return grammar, _ONE_OF if "coerce_one_of" in error else error


def rewrite_schema(schema: Any, *, closes_objects: bool) -> tuple[dict[str, Any], "JsonCompileOptions"]:
    """Rewrite a schema from `read_schema`, except for its numbers, and choose llguidance's options.

    Raises SchemaError.
    """
    if isinstance(schema, bool):  # llguidance takes options only for a schema that is an object
        schema = {} if schema else {"not": {}}
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise SchemaError("x-guidance is not supported; leave it out")
    rewrite_counts(schema)
    check_ends(schema)
    tag_unions(schema)
    if closes_objects:
        schema = close_objects(schema)
    schema = KeyPatterns(_TOKENIZER).list_keys(schema)
    return schema, {**_JSON_OPTIONS, "json_allowed_escapes": json_escapes(schema)}


def _schema_grammar(text: str, closes_objects: bool) -> str:
    schema, options = rewrite_schema(read_schema(text), closes_objects=closes_objects)
    try:
        grammar = LLMatcher.grammar_from_json_schema(write_schema(rewrite_numbers(schema)), overrides=options)
    except NumberError:
        grammar = LLMatcher.grammar_from_lark(schema_grammar(schema, options))
    if len(grammar) > MAX_GRAMMAR:
        raise SchemaError(f"its grammar has {len(grammar)} characters; at most {MAX_GRAMMAR} are allowed")
    return grammar


def _grammar(kind: str, texts: Sequence[str]) -> str:
    if kind == "regex":
        return LLMatcher.grammar_from_regex(texts[0])
    if kind == "choice":
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return LLMatcher.grammar_from_lark(f"start: {options}")
    return LLMatcher.grammar_from_lark(any_to_lark(texts[0]))


def _grammars(compiled: str) -> list[dict[str, Any]]:
    """The grammars in a compiled grammar, which is JSON or one text in Lark's syntax."""
    if not compiled.startswith("{"):
        return [{"lark_grammar": compiled}]
    found: list[dict[str, Any]] = json.loads(compiled)["grammars"]
    return found


def _answer(message: bytes) -> bytes:
    kind, closes_objects, *texts = json.loads(message)
    return json.dumps(compile_form(kind, texts, closes_objects=closes_objects)).encode()


if __name__ == "__main__":
    serve(connect_to_the_front_end(), _answer, MAX_KEPT)
