"""The arguments of tool calls in a chat's history, as chat templates need them.

Some chat templates read arguments as an object, and others as JSON text. `Arguments` is both.
"""

import json
from typing import Any

from scheduler_service.frontend.rendering.bounded_json import Copied, Values, parse
from scheduler_service.frontend.rendering.encoding_errors import TemplateError


class Arguments(Copied):
    """An object that is a JSON text wherever a template prints or appends it."""

    __slots__ = ("_json_text",)  # templates cannot read attributes that begin with an underscore

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._json_text = text

    def __str__(self) -> str:
        return self._json_text

    def __add__(self, other: str) -> str:
        return self._json_text + other

    def __radd__(self, other: str) -> str:
        return other + self._json_text


def read_calls(place: str, calls: Any, values: Values) -> None:
    """Convert the arguments of each call in a message's parsed `tool_calls`, in place. Raises TemplateError."""
    if not isinstance(calls, list):
        raise TemplateError(f"{place} is no list")
    for number, call in enumerate(calls):
        if not isinstance(call, dict):
            raise TemplateError(f"{place}[{number}] is no object")
        function, name = (call["function"], ".function") if "function" in call else (call, "")
        if isinstance(function, dict) and "arguments" in function:
            name = f"{place}[{number}]{name}.arguments"
            function["arguments"] = _read_arguments(name, function["arguments"], values)


def _read_arguments(place: str, arguments: Any, values: Values) -> Arguments:
    """Convert arguments in any form that clients send: an object, its JSON text, an empty text or null."""
    text = arguments if isinstance(arguments, str) else None
    if text is not None:
        arguments = parse(place, text, allows_twice=True) if text.strip() else None
    if arguments is None:
        arguments, text = {}, "{}"
    copied = values.copy(place, arguments)
    if not isinstance(copied, dict):
        raise TemplateError(f"{place} is {json.dumps(arguments)[:32]}; it must be an object, or the JSON text of one")
    return Arguments(copied, values.copy(place, json.dumps(arguments, ensure_ascii=False) if text is None else text))
