"""Forms for outputs: JSON schemas, hand-picked, generated and JSON Schema's own; expressions; grammars."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

_TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_LIST: Schema = {
    "type": "object",
    "properties": {"head": {"type": "boolean"}, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["head", "tail"],
    "additionalProperties": False,
}
_CALL: Schema = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, field: schema},
            "required": ["kind", field],
            "additionalProperties": False,
        }
        for kind, field, schema in (
            ("weather", "city", {"type": "string", "minLength": 1, "maxLength": 12}),
            ("sum", "numbers", {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}),
        )
    ]
}
HAND_PICKED: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer"},
    {"type": "number"},
    {"type": ["integer", "null"]},
    {"const": {"a": [1, 2.5, None, True, 'é"\\\n']}},
    {"enum": ["red", "green", 3, None, [1], {"a": 1}]},
    {"type": "string", "maxLength": 10},
    {"type": "string", "minLength": 30, "maxLength": 30},
    {"type": "string", "minLength": 150, "maxLength": 250},
    {"type": "string", "maxLength": 999},
    {"type": "string", "pattern": "^[a-z]{200,300}$"},
    {"type": "string", "pattern": "^[a-f0-9]{8}-[a-f0-9]{4}$"},
    {"type": "string", "pattern": "^(\\+|-)?[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "integer", "minimum": -5, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 1000, "maximum": 99999},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 5, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": False, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}, {"type": "array", "maxItems": 0}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    _TREE,
    _LIST,
    _CALL,
]


def _distinct(count: int, first: Iterable[str], draw: Callable[[], str]) -> list[str]:
    """`count` different texts: `first`, then drawn ones."""
    found = dict.fromkeys(first)
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _schema(draw: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _plain, _enum]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return draw.choice(kinds)(draw, depth)


def _plain(draw: random.Random, _: int) -> Schema:
    return {"type": draw.choice(["boolean", "null"])}


def _enum(draw: random.Random, _: int) -> Schema:
    values = draw.sample(["yes", "no", "", 'a"b', "\\", "日本", 0, -1, 2.5, True, None, [1, "x"], {"k": None}], 3)
    return {"enum": values} if draw.random() < 0.7 else {"const": values[0]}


def _string(draw: random.Random, _: int) -> Schema:
    if draw.random() < 0.4:
        patterns = ["^[A-Z][a-z]{2,6}$", "^\\d{3}-\\d{4}$", "^(foo|bar)+$", "^[^a-y]{1,4}$", "^v\\d+\\.\\d+$", "^$"]
        return {"type": "string", "pattern": draw.choice(patterns)}
    most = 300 if draw.random() < 0.1 else 20
    low = draw.randrange(most // 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(most)}


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randrange(-1000, 1000)
    schema: Schema = {"type": "integer", draw.choice(["minimum", "exclusiveMinimum"]): low}
    if draw.random() < 0.7:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.randrange(2, 2000)
    return schema


def _number(draw: random.Random, _: int) -> Schema:
    low = round(draw.uniform(-100, 100), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + draw.uniform(0.5, 100), 2)}


def _array(draw: random.Random, depth: int) -> Schema:
    low = draw.randrange(3)
    schema: Schema = {"type": "array", "items": _schema(draw, depth - 1), "minItems": low}
    schema["maxItems"] = low + draw.randrange(3)
    return schema


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["a", "name", "long name", "Ü", "x_1", 'q"', "$ref "], draw.randrange(1, 5))
    required = [name for name in names if draw.random() < 0.6]
    properties = {name: _schema(draw, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.randrange(2, 4))]}


SUITE: list[dict[str, Any]] = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())["groups"]
"""Draft 2020-12: schemas with `tests`, whose `data` is `valid` or not. The file names its source."""

_draw = random.Random(1)
SCHEMAS = _distinct(300, map(json.dumps, HAND_PICKED), lambda: json.dumps(_schema(_draw, 3)))
"""Generated ones are nested, and use everything above."""

_PARTS = [
    "[a-z]{2,5}", "[0-9]{1,4}", "(yes|no|maybe)", "x?", "[^a-zA-Z\\s]", "(ab|cd){1,3}", "é+?!", "\\.", "[A-F0-9]{6}",
    "(1(2(3)?)?)?", "[a-zA-Z0-9_]{3}", " ", "(Mon|Tue|Wed)day", "a{3}", "(-|\\+)?[0-9]+", "[\\u4e00-\\u4e20]",
]  # fmt: skip
REGEXES = _distinct(
    100,
    [
        "yes|no",
        "[0-9]{4}-[0-9]{2}-[0-9]{2}",
        "(?i)hello",
        "a/b",
        "[a-z]{3,8}@[a-z]{3,8}\\.(com|org)",
        "[a-z ]{150,350}",
        "([0-9a-f]{2}:){99}[0-9a-f]{2}",
    ],
    lambda: "".join(_draw.sample(_PARTS, _draw.randrange(1, 5))),
)

GRAMMARS: list[tuple[str, str]] = [
    ('start: "a" start "b" | "c"', r"a*cb*"),
    ('root ::= "a" root "b" | "c"', r"a*cb*"),
    ('start: /[0-9]{1,3}/ ("+" /[0-9]{1,3}/)*', r"\d{1,3}(\+\d{1,3})*"),
    ('root ::= num ("," num)?\nnum ::= [0-9]{1,2}', r"\d{1,2}(,\d{1,2})?"),
    ('start: "SELECT " NAME " FROM " NAME\nNAME: /[a-z]{1,6}/', r"SELECT [a-z]{1,6} FROM [a-z]{1,6}"),
    ('start: greeting " " name "!"\ngreeting: "Hi" | "Hello"\nname: "Ann" | "Bob"', r"(Hi|Hello) (Ann|Bob)!"),
    ('start: "(" start ")" |', r"\(*\)*"),
    ('start: item ~ 2..3\nitem: "x" | "y"', r"[xy]{2,3}"),
    ('start: item{2,3}\nitem: "x" | "y"', r"[xy]{2,3}"),
    ('root ::= "\\"" [a-c]* "\\""', r'"[a-c]*"'),
    ("start: /a+/ /b+/", r"a+b+"),
    ('start: "é" | "日本"', r"é|日本"),
    ('start: A B?\nA: "1"\nB: "2"', r"12?"),
    ('start: expr\nexpr: term | expr "-" term\nterm: "1" | "(" expr ")"', r"[-1()]+"),
    ('root ::= (yes | no) "."\nyes ::= "yes"\nno ::= "no"', r"(yes|no)\."),
    ('start: %json {"type": "integer", "minimum": 1, "maximum": 9}', r"[1-9]"),
    ('start: "x=" %json {"type": "boolean"}', r"x=(true|false)"),
    ("start: /(?i)abc/", r"(?i)abc"),
    ('start: "a"+ "b"~3', r"a+bbb"),
    ('root ::= line line\nline ::= [a-z]{1,3} "\\n"', r"([a-z]{1,3}\n){2}"),
]
"""Each with a regular expression that matches all of its texts."""
