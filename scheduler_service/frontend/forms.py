"""The form that a request's output must have: read, and checked as the worker will read it, before a worker is asked.

llguidance compiles forms to grammars, within limits of size and work. It is done on a thread of its own, once for each
text, so that forms wait for forms alone; of the 0.1 to 100 ms that 64 KiB take, little is under the interpreter's lock.
The worker, which knows the tokens, follows the grammar: worker_service/execution/forms.py.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.forms import parser_limits
from scheduler_service.frontend.tokenization import without_panic

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_FORM_BYTES = 64 << 10
MAX_CHOICES = 1024
MOST_KEPT_BYTES = 4 << 20
"""Of grammars that are kept."""
MOST_REASON = 500
"""Characters of what is wrong with a form."""

_JSON_OPTIONS: "JsonCompileOptions" = {
    # Without a bound, small models go on with spaces until the output is full.
    "whitespace_pattern": r"[ \n\r\t]{1,32}",
    # A schema may set these otherwise, and its outputs would not always be valid then.
    "lenient": False,
    "coerce_one_of": False,
}


class FormError(ValueError):
    """The form cannot be followed; names the field and what is wrong with it, and where."""


class Forms:
    """Grammars of forms, those that were asked for lately at once."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, str] = OrderedDict()  # by digests; the one that was used last is last
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1, "forms")

    async def read(self, sampling: pb.SamplingParams) -> str:
        """The grammar of a request's form, "" if it has none. Raises FormError."""
        kind = sampling.WhichOneof("constraint")
        if kind is None:
            return ""
        texts = _texts(kind, sampling)
        digest = hashlib.sha256("\0".join((kind, *map(repr, texts))).encode()).digest()
        grammar = self._grammars.get(digest)
        if grammar is None:
            compiling = asyncio.get_running_loop().run_in_executor(self._thread, _compile, kind, texts)
            grammar = await compiling
            self._keep(digest, grammar)
        else:
            self._grammars.move_to_end(digest)
        return grammar

    def _keep(self, digest: bytes, grammar: str) -> None:
        if digest not in self._grammars:
            self._num_bytes += len(grammar)
        self._grammars[digest] = grammar
        while self._num_bytes > MOST_KEPT_BYTES:
            _, oldest = self._grammars.popitem(last=False)
            self._num_bytes -= len(oldest)


def _texts(kind: str, sampling: pb.SamplingParams) -> list[str]:
    """What was said of the form. Raises FormError if there is too much of it, or nothing."""
    if kind == "choice":
        name, texts = "sampling.choice.options", list(sampling.choice.options)
        if not 1 <= len(texts) <= MAX_CHOICES:
            raise FormError(f"{name} has {len(texts)} entries; it must have between 1 and {MAX_CHOICES}")
    else:
        name, texts = f"sampling.{kind}", [getattr(sampling, kind)]
    if not all(texts):
        raise FormError(f"{name} is empty" if kind != "choice" else f"{name}[{texts.index('')}] is empty")
    if (size := sum(len(text.encode()) for text in texts)) > MAX_FORM_BYTES:
        raise FormError(f"{name} has {size} bytes; at most {MAX_FORM_BYTES} are allowed")
    return texts


def _compile(kind: str, texts: Sequence[str]) -> str:
    try:
        grammar = without_panic(lambda: _grammar(kind, texts))
        error = without_panic(lambda: LLMatcher.validate_grammar(grammar, limits=parser_limits()))
    except Exception as failure:  # of the library's own kinds
        error = str(failure) or type(failure).__name__
    if error and not error.startswith("WARNING"):
        raise FormError(f"sampling.{kind} cannot be followed: {_short(error)}")
    return grammar


def _grammar(kind: str, texts: Sequence[str]) -> str:
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(texts[0], overrides=_JSON_OPTIONS)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(texts[0])
    if kind == "choice":
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return LLMatcher.grammar_from_lark(f"start: {options}")
    return LLMatcher.grammar_from_lark(any_to_lark(texts[0]))


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MOST_REASON else f"{line[:MOST_REASON]}…"
