"""The process that writes and compiles the grammars of messages with tool calls (tool_grammars.py).

Clients' schemas may take long to rewrite and to compile, so limited_work.py limits time and memory of the process.
"""

import json
import pickle
from collections.abc import Sequence
from typing import Any

from scheduler_service.frontend.chat.grammar.lark import object_schema
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tool_grammar import ANSWER, GrammarError, ModelTokens, tool_grammar
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.forms.form_compiler import MAX_KEPT, compile_form
from scheduler_service.frontend.forms.schema_text import SchemaError
from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve


def compile_tools(syntax: ChatSyntax, tokens: ModelTokens, message: bytes) -> tuple[str, str]:
    """The grammar for a message of tool_grammars.py, and an error message. Raises MemoryError or RecursionError."""
    values, arguments, options, form = json.loads(message)
    tools, content = [Tool(*value) for value in values], ""
    if form is not None:
        kind, texts, closes_objects = form
        content, error = compile_form(kind, texts, closes_objects=closes_objects)
        if error:
            return "", f"sampling.{kind} cannot be followed: {error}"
    grammar, error = _compile(syntax, tokens, tools, arguments, options, content)
    return grammar, error and f"the tools cannot be followed: {error}"


def _compile(
    syntax: ChatSyntax, tokens: ModelTokens, tools: Sequence[Tool], arguments: Any, options: Any, content: str
) -> tuple[str, str]:
    try:
        grammar = tool_grammar(syntax, tools, *arguments, **options, has_form=content != "", tokens=tokens)
    except (GrammarError, SchemaError) as error:
        return "", str(error)
    except (MemoryError, RecursionError):
        raise
    except (AttributeError, KeyError, TypeError, ValueError):  # a keyword of a schema has a value of a wrong type
        return "", "a keyword in a schema has a value of another kind than it must have"
    except BaseException as failure:  # a panic in Rust is a `BaseException`, not an `Exception`
        return "", str(failure) or type(failure).__name__
    compiled, reason = compile_form("grammar", [grammar], parts={ANSWER: content} if content else None)
    return ("", _reason(tools, reason)) if reason else (compiled, "")


def _reason(tools: Sequence[Tool], error: str) -> str:
    """The error of the first tool whose schema alone has an error. The whole grammar's error quotes the grammar."""
    for tool in tools:
        _, reason = compile_form("json_schema", [json.dumps(object_schema(tool))], closes_objects=tool.strict)
        if reason:
            return f"the parameters of {tool.name!r}: {reason}"
    return error.partition("\n")[0]


def main() -> None:
    connection = connect_to_the_front_end()
    syntax, tokens = pickle.loads(connection.recv_bytes())  # noqa: S301  # bytes from the front end are trusted
    serve(connection, lambda message: json.dumps(compile_tools(syntax, tokens, message)).encode(), MAX_KEPT)


if __name__ == "__main__":
    main()
