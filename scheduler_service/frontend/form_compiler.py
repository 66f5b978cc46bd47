"""Compiles forms outside of the front end, which starts it with a socket as stdin: `compile_form` says what that is.

A form can be made to take hours and all memory, and the library cannot be told to stop. So the system ends the process
that compiles, by a timer and a limit that this process sets for it: this one has imported the library, and forks
another one when one has ended, which takes milliseconds. What one was ended by is the reason why its form is refused.
"""

import json
import os
import re
import resource
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pagewire_common.child_process import end_with_the_parent, leave_signals_to_the_parent
from pagewire_common.forms import MOST_SECONDS, parser_limits
from scheduler_service.frontend.schema_grammar import schema_grammar
from scheduler_service.frontend.schema_keys import KeyPatterns, json_escapes
from scheduler_service.frontend.schema_numbers import NumberError, rewrite_numbers
from scheduler_service.frontend.schema_objects import close_objects
from scheduler_service.frontend.schema_text import SchemaError, read_schema, write_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_MEMORY = 256 << 20
"""Bytes of data of a process that compiles, of which it has 13 MiB at its start. A schema of 50 KB with 1,800
properties takes it to 34 MiB, and nothing was found that takes more than 90 within `MOST_SECONDS`."""
MOST_KEPT_KIB = 32 << 10
"""A process that has held more memory, of which it has 20 MiB at its start, gives it back by its end."""
MOST_GRAMMAR = 256 << 10
"""Characters of a schema as llguidance gets it: closed, it may be larger than what the client has sent."""
_END, _ANOTHER = 0, 3
"""Exit statuses of a process that compiles: no form will come, and another process should go on."""

_JSON_OPTIONS: "JsonCompileOptions" = {
    # Without a bound, small models go on with spaces until the output is full.
    "whitespace_pattern": r"[ \n\r\t]{1,32}",
    # A schema may set these otherwise, and its outputs would not always be valid then.
    "lenient": False,
    "coerce_one_of": False,
}
_TOO_MUCH_MEMORY = f"it takes more than {MOST_MEMORY >> 20} MiB of memory to compile"
_NESTED = "it is nested too deeply to compile"
_ENDED_BY: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {MOST_SECONDS:g} s of a processor to compile",
    signal.SIGABRT: _TOO_MUCH_MEMORY,  # as Rust ends a process that is given none
    signal.SIGSEGV: _NESTED,  # as the system ends one whose stack is full
}
_TOKENIZER = LLTokenizer("byte")
"""Of the bytes alone: a model's own takes seconds to read, and most memory of the process."""
_OF_THE_MODEL = re.compile(r"special token|token range|token id", re.IGNORECASE)
"""In errors about tokens that a grammar names: a worker knows them, and this process does not."""


def compile_form(kind: str, texts: Sequence[str], *, closes_objects: bool = False) -> tuple[str, str]:
    """The grammar of a form, and what is wrong with it, "" for nothing. With `closes_objects`, an object whose JSON
    schema names keys has no other keys, unless the schema says otherwise.

    The grammar is tried as a worker tries it: a form that exceeds llguidance's limits before the first token is found.
    """
    try:
        grammar = _schema_grammar(texts[0], closes_objects) if kind == "json_schema" else _grammar(kind, texts)
        matcher = LLMatcher(_TOKENIZER, grammar, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()
        error = matcher.get_error()
        if _OF_THE_MODEL.search(error):
            error = LLMatcher.validate_grammar(grammar, limits=parser_limits())
            error = "" if error.startswith("WARNING") else error
    except MemoryError:
        return "", _TOO_MUCH_MEMORY
    except RecursionError:
        return "", _NESTED
    except (AttributeError, KeyError, TypeError):  # of the code that reads a schema
        return "", "a keyword in it has a value of another kind than it must have"
    except BaseException as failure:  # of the library's own kinds; a panic of Rust is no `Exception`
        return "", str(failure) or type(failure).__name__
    return grammar, error


def _schema_grammar(text: str, closes_objects: bool) -> str:
    schema = read_schema(text)
    if isinstance(schema, bool):  # llguidance takes options with objects only
        schema = {} if schema else {"not": {}}
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise SchemaError("x-guidance is not obeyed here; leave it out")
    if closes_objects:
        schema = close_objects(schema)
    schema = KeyPatterns(_TOKENIZER).list_keys(schema)
    options: JsonCompileOptions = {**_JSON_OPTIONS, "json_allowed_escapes": json_escapes(schema)}
    try:
        grammar = LLMatcher.grammar_from_json_schema(write_schema(rewrite_numbers(schema)), overrides=options)
    except NumberError:
        grammar = LLMatcher.grammar_from_lark(schema_grammar(schema, options))
    if len(grammar) > MOST_GRAMMAR:
        raise SchemaError(f"its grammar has {len(grammar)} characters; at most {MOST_GRAMMAR} can be followed")
    return grammar


def _grammar(kind: str, texts: Sequence[str]) -> str:
    if kind == "regex":
        return LLMatcher.grammar_from_regex(texts[0])
    if kind == "choice":
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return LLMatcher.grammar_from_lark(f"start: {options}")
    return LLMatcher.grammar_from_lark(any_to_lark(texts[0]))


def _serve(connection: Connection) -> int:
    """Compile what is asked for, within the limits, and return the exit status."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            kind, closes_objects, *texts = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return _END
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        found = compile_form(kind, texts, closes_objects=closes_objects)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(found).encode())
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_KEPT_KIB:
            return _ANOTHER


def main() -> None:
    end_with_the_parent()
    leave_signals_to_the_parent()
    connection = Connection(0)
    while True:
        if not (process := os.fork()):
            status = _END
            try:
                end_with_the_parent()
                status = _serve(connection)
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if (reason := _ENDED_BY.get(-status)) is not None:
            connection.send_bytes(json.dumps(("", reason)).encode())
        elif status != _ANOTHER:  # no form will come, or it was killed: the front end starts anew and asks again
            return


if __name__ == "__main__":
    main()
