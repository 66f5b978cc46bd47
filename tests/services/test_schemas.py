"""What ends is valid for its schema, keys and numbers: no keys where it is closed but those that it names. A schema for
which that cannot be is refused by its keyword."""

import json
import re
import time
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_walks import grammar_of, may_be_written, texts_of, validate

from scheduler_service.frontend.forms.form_compiler import compile_form
from scheduler_service.frontend.forms.integer_ranges import integers_between

SEEDS = 4
BIG = 2**60 + 1
LARGE = st.integers(-(1 << 65), 1 << 65) | st.sampled_from(
    [sign * ((1 << bits) + more) for bits in (31, 53, 63, 64) for sign in (1, -1) for more in (-1, 0, 1)]
)
NUMBERS = (
    st.integers(-30, 30)
    | LARGE
    | st.builds(
        lambda number, places: Decimal(number).scaleb(-places), st.integers(-(10**6), 10**6), st.integers(0, 20)
    )
)
BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"), NUMBERS),
        "multipleOf": st.sampled_from([1, 2, 7, 100, Decimal("0.5"), Decimal("0.01"), Decimal("0.1")]),
    },
)
NEAR = st.builds(
    lambda low, more, below, above: {
        below: low,
        above: low + more if isinstance(low, int) else low + Decimal(more) / 100,
    },
    NUMBERS,
    st.integers(0, 9),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
)
TYPED = st.builds(
    lambda kind, bounds: {"type": kind} | bounds,
    st.sampled_from(["number", "integer", ["integer", "null"], ["number", "null"]]),
    BOUNDS | NEAR,
)
SCHEMAS = st.recursive(
    TYPED
    | st.builds(lambda value: {"const": value}, NUMBERS)
    | st.builds(lambda values: {"enum": values}, st.lists(NUMBERS, min_size=1, max_size=3))
    | st.builds(
        lambda kind, parts: {"type": kind, "allOf": parts},
        st.sampled_from(["number", "integer"]),
        st.lists(BOUNDS | NEAR, min_size=1, max_size=2),
    ),
    lambda inner: (
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
        | st.builds(lambda a: {"type": "array", "items": a, "minItems": 1, "maxItems": 2}, inner)
        | st.builds(
            lambda a, b, required: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": required,
                "additionalProperties": False,
            },
            inner,
            inner,
            st.sampled_from([[], ["a"], ["a", "b"]]),
        )
        | st.builds(
            lambda a, b, pattern: {
                "type": "object",
                "properties": {"score": a},
                "required": ["score"],
                "patternProperties": {pattern: b},
                "additionalProperties": False,
            },
            inner,
            inner,
            st.sampled_from(["^score$", "^s", "^x$", "e$"]),
        )
        | st.builds(lambda a: {"type": "object", "additionalProperties": a, "maxProperties": 2}, inner)
    ),
    max_leaves=3,
)


@given(SCHEMAS | st.builds(lambda schema: {"$ref": "#/$defs/n", "$defs": {"n": schema}}, SCHEMAS))
def test_what_ends_is_valid_with_exact_numbers(schema: Any) -> None:
    grammar, error = grammar_of(schema)
    for text in () if error else texts_of(grammar, SEEDS):
        validate(text, schema)


def between(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


NUMBERS_WRITTEN: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "number", "exclusiveMinimum": 0, "maximum": Decimal("0.01")}, ["0.01", "0.000001"], ["0", "0.0"]),
    ({"type": "number", "exclusiveMinimum": 10, "exclusiveMaximum": Decimal("10.01")}, ["10.001"], ["10", "10.01"]),
    ({"type": "number", "minimum": Decimal("-0.01"), "exclusiveMaximum": 0}, ["-0.01"], ["0", "-0", "-0.0"]),
    ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": Decimal("0.5")}]}, ["0.5"], ["0", "0.0"]),
    ({"const": 1234567890123456789}, ["1234567890123456789"], ["1234567890123456768"]),
    ({"enum": [1234567890123456789, "x", [-(2**63), 1]]}, ['"x"', f"[{-(2**63)},1]"], ["1234567890123456768"]),
    ({"enum": [{"é": 2**53 + 1}]}, [f'{{"é":{2**53 + 1}}}'], [f'{{"é":{2**53}}}']),
    (between(2**53 + 1, 2**53 + 3), [f"{2**53 + more}" for more in (1, 2, 3)], [f"{2**53}", f"{2**53 + 4}"]),
    (between(-(2**63), -(2**63) + 8), [f"{-(2**63)}", f"{-(2**63) + 7}"], [f"{-(2**63) - 1}", "-1"]),
    (between(0, 2**64 - 1), ["0", f"{2**64 - 1}"], [f"{2**64}", "-0", "-1"]),
    (between(-(2**63), 2**63 - 1), ["0", "-5", f"{2**63 - 1024}"], [f"{2**63}"]),
    ({"type": "integer", "const": Decimal("1e20")}, ["100000000000000000000"], ["9223372036854775807"]),
    ({"type": "integer", "exclusiveMinimum": Decimal("0.5"), "exclusiveMaximum": 2}, ["1"], ["0", "2"]),
    ({"type": "number", "maximum": Decimal("1.7976931348623157e308")}, ["0.5", "-7"], []),
    (
        {"type": "array", "items": {"anyOf": [{"const": 2**60 + 1}, {"type": "null"}]}, "minItems": 1},
        [f"[null,{2**60 + 1}]"],
        ["[]"],
    ),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {
                    "type": "object",
                    "properties": {"id": {"const": 2**60 + 1}, "a": {"$ref": "#/$defs/a"}},
                    "required": ["id"],
                    "additionalProperties": False,
                }
            },
        },
        [f'{{"id":{2**60 + 1},"a":{{"id":{2**60 + 1}}}}}'],
        ["{}"],
    ),
    (between(0, 10**100 + 9), ["0", f"{10**100 + 9}"], [f"{10**100 + 10}", "-1"]),
    (between(-(10**150) // 7, 10**120 // 7), [f"{-(10**150) // 7}", "0", f"{10**120 // 7}"], [f"{10**120 // 7 + 1}"]),
    (
        {"type": "array", "items": {"const": BIG}, "minItems": Decimal("2.0"), "maxItems": Decimal("2.0")},
        [f"[{BIG},{BIG}]"],
        [f"[{BIG}]", f"[{BIG},{BIG},{BIG}]"],
    ),
    ({"type": "array", "items": {"const": 1}, "minItems": Decimal("1.0"), "maxItems": 10**300}, ["[1,1]"], ["[]"]),
    ({"type": "integer", "example": Decimal("1e390"), "x-note": {"minItems": Decimal("1e390")}}, ["1"], ["1.5"]),
]
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
TREE = {"type": "object", "properties": {"a": {"type": "integer"}, "more": {"$ref": "#/$defs/tree"}}}
FEW = {"type": "integer", "minimum": 0, "maximum": 9}


def model(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    """As pydantic writes it, whose tag has a default."""
    tag = {"const": kind, "default": kind, "title": "Kind", "type": "string"}
    return {"type": "object", "properties": {"kind": tag, "n": value}, "required": ["n"], "title": kind.title()}


OBJECTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
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
    "a union of models whose tags have defaults": (
        {
            "type": "object",
            "properties": {
                "pet": {
                    "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                }
            },
            "required": ["pet"],
            "$defs": {"Cat": model("cat", FEW), "Dog": model("dog", {"$ref": "#/$defs/Cat"})},
        },
        ['{"pet":{"kind":"cat","n":1}}', '{"pet":{"kind":"dog","n":{"kind":"cat","n":1}}}'],
        ['{"pet":{"kind":"dog","n":1}}', '{"pet":{"n":1}}', '{"pet":{"kind":"cow","n":1}}'],
    ),
    "a union within a union, with ids of 64 bits": (
        {
            "oneOf": [
                {"oneOf": [model("a", {"const": BIG}), model("b", {"const": BIG + 2})]},
                {"$ref": "#/$defs/C"},
            ],
            "$defs": {"C": model("c", {"type": "null"})},
        },
        [f'{{"kind":"a","n":{BIG}}}', f'{{"kind":"b","n":{BIG + 2}}}', '{"kind":"c","n":null}'],
        [f'{{"kind":"b","n":{BIG}}}', '{"n":null}'],
    ),
    "itself, or an end": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}, FEW]}}},
        ["1", "[[],2]"],
        ["null"],
    ),
}


@pytest.mark.parametrize(
    ("schema", "written", "not_written"),
    [*NUMBERS_WRITTEN, *OBJECTS.values()],
    ids=[*map(str, range(len(NUMBERS_WRITTEN))), *OBJECTS],
)
def test_what_is_valid_for_a_closed_schema_can_be_written_and_nothing_else(
    schema: Any, written: list[str], not_written: list[str]
) -> None:
    grammar, error = grammar_of(schema, closes_objects=True)
    assert not error
    for text in written:
        validate(text, schema)
        assert may_be_written(grammar, text), text
    for text in not_written:
        assert not may_be_written(grammar, text), text
    for text in texts_of(grammar, SEEDS):
        validate(text, schema)


@pytest.mark.parametrize("name", ["plain", "nested", "itself", "any of several"])
def test_an_open_schema_has_any_keys(name: str) -> None:
    schema = OBJECTS[name][0]
    grammar, _ = grammar_of(schema)
    text = next(text for text in OBJECTS[name][2] if '"x"' in text)
    jsonschema.validate(json.loads(text), schema)
    assert may_be_written(grammar, text)


@pytest.mark.parametrize("name", [name for name in OBJECTS if "union" in name])
def test_a_union_is_told_apart_where_other_keys_may_come(name: str) -> None:
    schema, written, _ = OBJECTS[name]
    grammar, error = grammar_of(schema)
    assert not error
    assert all(may_be_written(grammar, text) for text in written)
    for text in texts_of(grammar, SEEDS):
        validate(text, schema)


def test_bounds_are_excluded_as_draft_4_has_it() -> None:
    grammar, _ = grammar_of({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 1})
    assert [may_be_written(grammar, text) for text in "012"] == [False, True, False]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"a": {"multipleOf": Decimal("0.57")}}},
            "#/properties/a/multipleOf is 0.57, which is not supported",
        ),
        ({"multipleOf": 0}, "#/multipleOf is not a number above 0"),
        ({"minimum": "1"}, "#/minimum is not a number"),
        ({"type": "number", "minimum": 2**64}, "# has a bound beyond 9.2e.18"),
        (
            {"items": {"oneOf": [{"const": 2**60 + 1}]}, "type": "array"},
            "#/items/oneOf is not supported next to or around",
        ),
        ({"type": "integer", "const": 2**60 + 1, "maximum": 2**61}, "#/maximum is not supported next to or around"),
        (
            {"type": ["string", "integer"], "format": "date", "enum": [2**60 + 1]},
            "#/format is not supported next to or around",
        ),
        (between(2**60 + 3, 2**60 + 1), "# has bounds with no integer between them"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multiples .* too large together"),
        ({"minimum": Decimal("1e999")}, "has the number 1E.999"),
        ({"minLength": -1}, "#/minLength is -1; it must be an integer of at least 0"),
        ({"items": {"maxItems": Decimal("2.5")}}, "#/items/maxItems is 2.5; it must be an integer"),
        ({"maxProperties": True}, "#/maxProperties is True; it must be an integer"),
        ({"minItems": Decimal("1e390")}, "#/minItems is 1e.390, which no output reaches"),
        ({"type": "string", "maximal": Decimal("1e390")}, "the number 1e.390, which is beyond the largest double"),
        ({"$ref": "#"}, "#/.ref leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads back to"),
        ({"allOf": [{"anyOf": [{"$ref": "#"}]}]}, "#/allOf/0/anyOf/0/.ref leads back to itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#/properties/a/.ref leads back"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items/.ref leads back to itself"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#/prefixItems/0/.ref leads back"),
        (
            {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
            "additionalProperties/.ref leads",
        ),
        ({"oneOf": [B, B | {"title": "again"}]}, 'alternatives of "oneOf" must differ in type'),
        ({"properties": {"a": {"$id": "b", "properties": {"c": True}}}}, 'as a part has a "\\$id"'),
        ({"allOf": [A, {"$ref": "#/nowhere"}]}, '"\\$ref" is #/nowhere'),
        ({"x-guidance": {"item_separator": "x"}}, "x-guidance is not supported"),
        ({"type": "object", "properties": {"a": 3, "b": {"const": 2**60 + 1}}}, "a value of a wrong type"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_keyword(schema: Any, words: str) -> None:
    grammar, error = grammar_of(schema, closes_objects=True)
    assert not grammar or error
    assert re.search(words, error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"minimum": NaN}', "it is not JSON: NaN"),
        ('{"a": 1, "a": 2}', 'the key "a" twice'),
        ('{"const": "\\ud800"}', "half of a surrogate pair"),
        ('{"minimum": ' + "9" * 500 + "}", "a number of 500 digits"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
    ],
)
def test_a_text_that_is_no_schema_is_refused(text: str, words: str) -> None:
    assert re.search(words, compile_form("json_schema", [text])[1])


ENDS = st.none() | st.integers(-(10**120), 10**120) | st.integers(-(10**20), 10**20) | st.integers(-300, 300)


@given(ENDS, ENDS, st.lists(st.integers(-(10**20), 10**20) | st.integers(-400, 400), max_size=20))
def test_an_expression_has_the_integers_of_its_range(first: int | None, last: int | None, others: list[int]) -> None:
    if first is not None and last is not None and first > last:
        first, last = last, first
    expression = re.compile(integers_between(first, last))
    near = [end + more for end in (first, last) if end is not None for more in (-1, 0, 1)]
    for number in [*others, *near, 0]:
        is_between = (first is None or first <= number) and (last is None or number <= last)
        assert bool(expression.fullmatch(str(number))) == is_between
    assert not expression.fullmatch("-0")
    assert not expression.fullmatch("00")


def test_a_schema_is_refused_or_read_within_its_time() -> None:
    """However many numbers, names and references it has; processes that compile have 0.3 s."""
    many = {f"n{number}": between(2**60 + number, 2**60 + number + 2) for number in range(600)}
    schemas: list[Any] = [
        {"type": "object", "properties": many, "additionalProperties": False},
        {"enum": [2**60 + 1 + number for number in range(3000)]},
        {"patternProperties": {f"^n{number}$": True for number in range(40)}, "properties": many},
        {
            "allOf": [{"$ref": "#/$defs/a"}] * 200,
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}] * 200}, "b": {"properties": many}},
        },
    ]
    for schema in schemas:
        began = time.process_time()
        assert len(json.dumps(schema)) < 64 << 10
        grammar_of(schema, closes_objects=True)
        assert time.process_time() - began < 5


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_schema_that_is_true_allows_any_value_and_false_none(is_closed: bool) -> None:
    grammar, error = compile_form("json_schema", ["true"], closes_objects=is_closed)
    assert not error
    assert may_be_written(grammar, '{"a":[1,null]}')
    assert compile_form("json_schema", ["false"], closes_objects=is_closed)[1]
