"""A model's chat template: Jinja in a sandbox, with the functions that transformers gives to templates.

A chat template comes with the model and is not trusted. The sandbox prevents a template from changing its input and
from accessing Python. The template runs in a process with limits of time and memory (template_renderer.py).
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from scheduler_service.frontend.rendering.encoding_errors import TemplateError, TooManyTokensError

_ASKS_FOR_VALUES = ("defined", "undefined", "none", "default", "d")
"""Tests and filters that treat a variable without a value differently."""


class ChatTemplate:
    """A chat template, compiled at its first use. `variables`: the texts of special tokens that it may use, by name."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self.variables = variables
        self._plain = ""

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template reads from outside. Raises TemplateError.

        A variable that the template itself sets counts only if the template asks whether the variable is defined.
        """
        with self._refusing():
            tree = self._environment.parse(self.source)
            read = meta.find_undeclared_variables(tree)
            own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
            asking = [*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter)]
            asked = {
                node.node.name for node in asking if isinstance(node.node, nodes.Name) and node.name in _ASKS_FOR_VALUES
            }
            return frozenset(read - own | read & asked)

    def render(self, values: Mapping[str, Any], most: int, *, plain: str = "") -> str:
        """Render a chat as text. `values`: the template's variables, by name.

        `plain`: characters that the filter `tojson` never escapes.

        Raises TemplateError, MemoryError, RecursionError, and TooManyTokensError if the text exceeds `most` characters.
        """
        self._plain = plain
        pieces: list[str] = []
        num_characters = 0
        with self._refusing():
            for piece in self._compiled.generate({**self.variables, **values}):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > most:
                    raise TooManyTokensError
        return "".join(pieces)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RecursionError, TooManyTokensError):
            raise
        except Exception as error:  # expressions in a template may raise any exception
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._environment.from_string(self.source)

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = self._to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        return environment

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Convert a value to JSON without HTML escapes, which Jinja's own filter `tojson` would add."""
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        if not ensure_ascii or text.isascii():
            return text
        return re.sub(r"[^\x00-\x7f]", lambda found: found[0] if found[0] in self._plain else _escape(found[0]), text)


class _Generation(Extension):
    """The tag `{% generation %}` … `{% endgeneration %}`, which marks the assistant's text for training.

    Rendering keeps the text inside the tag `generation`.
    """

    tags = {"generation"}  # noqa: RUF012  # the base class declares `tags` in this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """Creates dictionaries like the class `dict`, but hides the attributes of `dict` from templates."""

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
        raise SecurityError(f"a namespace has no attribute {name!r}: names begin with no underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1]
