"""A model's chat template: Jinja in a sandbox, with the functions that transformers gives to templates.

The template is not trusted: the sandbox prevents it from changing its input and from accessing Python.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from scheduler_service.frontend.text.encoding_errors import TemplateError, TooManyTokensError


class ChatTemplate:
    """A chat template, compiled at its first use. `variables`: the texts of special tokens that it may use, by name."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = variables

    def render(self, messages: Sequence[Mapping[str, Any]], most: int) -> str:
        """Raises TemplateError, MemoryError, RecursionError, and TooManyTokensError above `most` characters."""
        values = {**self._variables, "messages": messages, "tools": None, "documents": None}
        pieces: list[str] = []
        num_characters = 0
        try:
            for piece in self._compiled.generate(**values, add_generation_prompt=True):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > most:
                    raise TooManyTokensError
            return "".join(pieces)
        except (MemoryError, RecursionError, TooManyTokensError):
            raise
        except Exception as error:  # expressions in a template may raise any exception
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        return environment.from_string(self._source)


class _Generation(Extension):
    """The tag `{% generation %}` … `{% endgeneration %}` around the assistant's text, which is kept."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares `tags` in this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """Creates dictionaries like `dict`, but hides its attributes from templates."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace without attributes that begin with `_`: templates cannot replace Python's own attributes."""

    def __init__(*args: Any, **items: Any) -> None:  # allows `namespace(self=…)`
        self, args = args[0], args[1:]
        attributes = dict(*args, **items)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: names may not begin with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON without the HTML escapes of Jinja's own filter `tojson`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
