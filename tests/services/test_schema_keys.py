"""Keys that come twice, that patterns leave none of, or that are spelled with escapes: what ends is valid."""

import re
from typing import Any

import pytest
from schema_walks import grammar_of, may_be_written, texts_of, validate

FIVES = {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 99}
BIG = {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 3}


@pytest.mark.parametrize("pattern", ["^score$", "^(score|x)$", "^sco", "e$", "^x$", "^s(c|q)o?re$"])
def test_an_output_goes_on_behind_a_key_that_a_pattern_has_too(pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"score": FIVES, "x": {"type": "null"}},
        "required": ["score"],
        "additionalProperties": False,
        "patternProperties": {pattern: {"type": ["integer", "null"], "maximum": 50}},
    }
    grammar, error = grammar_of(schema)
    assert not error
    assert not may_be_written(grammar, '{"score":55}') or not re.search(pattern, "score")
    for text in texts_of(grammar, 20):
        validate(text, schema)


def test_keys_of_a_pattern_that_stands_apart_from_their_names_are_listed_too() -> None:
    schema = {
        "allOf": [{"type": "object", "patternProperties": {"^a$": FIVES}}, {"properties": {"a": {"maximum": 20}}}],
        "additionalProperties": False,
        "properties": {"a": True},
        "required": ["a"],
    }
    grammar, error = grammar_of(schema)
    assert not error
    assert [may_be_written(grammar, f'{{"a":{number}}}') for number in (5, 6, 25)] == [True, False, False]
    for text in texts_of(grammar, 20):
        validate(text, schema)


def test_names_that_are_keywords_are_names() -> None:
    inner = {"type": "object", "properties": {"a": FIVES}, "patternProperties": {"^a$": {"maximum": 20}}}
    closed = {"required": ["a"], "additionalProperties": False}
    names = dict.fromkeys(("const", "default", "patternProperties", "properties", "minProperties"), inner | closed)
    schema = {"type": "object", "properties": names, "required": ["default"], "additionalProperties": False}
    grammar, error = grammar_of(schema, closes_objects=True)
    assert not error
    assert may_be_written(grammar, '{"default":{"a":15},"patternProperties":{"a":0}}')
    assert not may_be_written(grammar, '{"default":{"a":25}}')
    assert not may_be_written(grammar, '{"default":{"a":15,')


@pytest.mark.parametrize("value", [{"type": "integer"}, BIG], ids=["schema", "grammar"])
def test_a_key_in_escapes_is_not_another_key(value: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": value}, "additionalProperties": {"type": "string"}}
    grammar, error = grammar_of(schema)
    assert not error
    number = value.get("minimum", 1)
    assert may_be_written(grammar, f'{{"a":{number},"b":"\\n\\"é"}}')
    assert not may_be_written(grammar, '{"\\u0061":"x"}')
    assert not may_be_written(grammar, '{"a":"x"}')


def test_control_characters_are_written_where_no_key_could_be_spelled_so() -> None:
    grammar, _ = grammar_of({"const": "a\x00b"})
    assert may_be_written(grammar, '"a\\u0000b"')
    assert not may_be_written(grammar, '"ab"')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "minProperties": 2}, "#/minProperties is 2, but outputs may repeat keys that are not"),
        ({"properties": {"a": True, "b": {"const": "a\x00b"}}}, "#/properties/b/const may have control characters"),
        (
            {"properties": {"a": True, "b": {"pattern": "a\\x00b"}}},
            "#/properties/b/pattern may have control char",
        ),
    ],
)
def test_what_would_not_hold_is_refused(schema: dict[str, Any], words: str) -> None:
    assert re.search(words, grammar_of(schema)[1])


def schemas_with(part: dict[str, Any]) -> list[dict[str, Any]]:
    """All that is spelled around a number that no double holds."""
    null = {"type": "null"}
    return [
        part,
        {"type": "object", "properties": {"a": null, "b": part, "c": {"const": 1}}},
        {"type": "object", "properties": {"a": null, "b": part}, "required": ["b", "z"]},
        {"type": "object", "properties": {"é": part}, "additionalProperties": {"enum": [1, "x"]}, "required": ["é"]},
        {"type": "object", "additionalProperties": part, "properties": {"a": False, "b": null}},
        {"type": "object", "additionalProperties": False, "properties": {"a": part, "b": part, "c": part}},
        {"type": "array", "items": part, "minItems": 2, "maxItems": 4},
        {"type": "array", "items": part},
        {"type": ["array", "null", "boolean"], "items": part, "maxItems": 1},
        {"items": part, "type": "array", "maxItems": 0},
        {"anyOf": [{"type": "array", "items": {"allOf": [part]}}, {"enum": [None, [], {}, [[2]]]}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}, part]}}},
    ]


WHOLE, OTHER = 2**60, 2**60 + 1
"""The second is no double."""


@pytest.mark.parametrize("number", range(12))
def test_a_grammar_has_the_texts_that_llguidance_has_of_the_schema(number: int) -> None:
    grammars = []
    for value in (WHOLE, OTHER):
        grammar, error = grammar_of(schemas_with({"enum": [None, value, "x", {"k": [value]}]})[number])
        assert not error
        grammars.append(grammar)
    theirs, ours = grammars
    assert [grammar.startswith("%llguidance") for grammar in grammars] == [False, True]
    for text in texts_of(theirs, 20):
        assert may_be_written(ours, text.replace(str(WHOLE), str(OTHER))), text
    for text in texts_of(ours, 20):
        assert may_be_written(theirs, text.replace(str(OTHER), str(WHOLE))), text
