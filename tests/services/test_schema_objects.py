"""Keys that a schema does not name: none where it is closed, whatever it is made of; and what is valid stays valid."""

import json
import re
from typing import Any

import jsonschema
import pytest
from schema_walks import grammar_of, may_be_written, texts_of, validate

from scheduler_service.frontend.form_compiler import compile_form

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
TREE = {"type": "object", "properties": {"a": {"type": "integer"}, "more": {"$ref": "#/$defs/tree"}}}
FEW = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (A, ['{"a":1}'], ['{"a":1,"x":1}', "{}"]),
    "an id of 64 bits": (
        {
            "type": "object",
            "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}},
            "required": ["id"],
        },
        ['{"id":18446744073709551615}'],
        ['{"id":18446744073709551616}', '{"id":1,"x":1}'],
    ),
    "parts of another, beside a definition of the name of a copy": (
        {
            "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/C"}],
            "$defs": {"open-0": FEW, "A": A, "C": B | {"required": ["b"]}},
        },
        ['{"a":1,"b":1}'],
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1,"x":1}'],
    ),
    "an id of 64 bits beside a pattern of nothing": (
        {
            "type": "object",
            "properties": {"id": {"const": 2**53 + 1}},
            "patternProperties": {},
            "x-note": 1,
            "required": ["id"],
        },
        ['{"id":9007199254740993}'],
        ['{"id":9007199254740992}'],
    ),
    "nested": (
        {"type": "object", "properties": {"in": A, "list": {"type": "array", "items": B}}},
        ['{"in":{"a":1},"list":[{"b":1},{}]}'],
        ['{"in":{"a":1,"x":1}}', '{"list":[{"x":1}]}', '{"x":1}'],
    ),
    "required alone": (
        {"type": "object", "properties": {"a": FEW}, "required": ["a", "z"]},
        ['{"a":1,"z":[null]}'],
        ['{"a":1}', '{"a":1,"z":1,"x":1}'],
    ),
    "a pattern": (
        {"type": "object", "properties": {"a": FEW}, "patternProperties": {"^p": FEW}},
        ['{"a":1,"p1":1}'],
        ['{"x":1}'],
    ),
    "says itself": ({**A, "additionalProperties": FEW}, ['{"a":1,"x":1}'], ['{"a":1,"x":"y"}']),
    "names nothing": ({"type": "object"}, ['{"x":1}'], ["1"]),
    "any of several": (
        {"anyOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        ['{"a":1}', '{"b":1}', "{}"],
        ['{"a":1,"b":1}', '{"b":1,"x":1}'],
    ),
    "itself": (
        {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
        ['{"a":1,"more":{"more":{"a":2}}}'],
        ['{"x":1}', '{"more":{"x":1}}'],
    ),
    "a part of another": (
        {
            "allOf": [{"$ref": "#/$defs/A"}, B],
            "properties": {"other": {"$ref": "#/$defs/A"}},
            "$defs": {"A": A},
        },
        ['{"a":1,"b":1,"other":{"a":1}}', '{"a":1}'],
        ['{"a":1,"x":1}', '{"a":1,"other":{"a":1,"b":1}}', '{"b":1}'],
    ),
    "one of all": ({"allOf": [A], "description": "as pydantic 1 has it"}, ['{"a":1}'], ['{"a":1,"x":1}']),
    "alternatives beside": (
        {"type": "object", "properties": {"a": FEW, "b": FEW}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":1,"x":1}'],
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_closed_schema_has_no_keys_that_it_does_not_name(name: str) -> None:
    schema, written, not_written = SCHEMAS[name]
    grammar, error = grammar_of(schema, closes_objects=True)
    assert not error
    for text in written:
        validate(text, schema)
        assert may_be_written(grammar, text), text
    for text in not_written:
        assert not may_be_written(grammar, text), text
    for text in texts_of(grammar, 10):
        validate(text, schema)


@pytest.mark.parametrize("name", ["plain", "nested", "itself", "any of several"])
def test_an_open_schema_has_any_keys(name: str) -> None:
    schema = SCHEMAS[name][0]
    grammar, _ = grammar_of(schema)
    text = next(text for text in SCHEMAS[name][2] if '"x"' in text)
    jsonschema.validate(json.loads(text), schema)
    assert may_be_written(grammar, text)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"$id": "b", "properties": {"c": True}}}}, 'as a part has a "\\$id"'),
        ({"allOf": [A, {"$ref": "#/nowhere"}]}, '"\\$ref" is #/nowhere'),
        ({"x-guidance": {"item_separator": "x"}}, "x-guidance is not obeyed here"),
    ],
)
def test_what_cannot_be_closed_is_refused(schema: dict[str, Any], words: str) -> None:
    assert re.search(words, grammar_of(schema, closes_objects=True)[1])


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_schema_that_is_true_allows_any_value_and_false_none(is_closed: bool) -> None:
    grammar, error = compile_form("json_schema", ["true"], closes_objects=is_closed)
    assert not error
    assert may_be_written(grammar, '{"a":[1,null]}')
    assert compile_form("json_schema", ["false"], closes_objects=is_closed)[1]
