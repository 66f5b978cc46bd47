"""Compiles the output form of a request (a JSON schema, regex, choice or grammar) to a grammar, and tests the grammar.

The library llguidance compiles output forms, in processes that are killed at a time limit (form_compiler.py). Two such
processes run, so that a slow form does not delay all other forms. If several requests have the same form at the same
time, the form is compiled once. Workers use the grammar to mask tokens (worker_service/execution/sampling/forms.py).
"""

import asyncio
import hashlib
import json
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.forms import MAX_SECONDS
from scheduler_service.frontend.limited.limited_process import LimitedProcess, LimitedProcesses, LimitError, Limits

MAX_FORM_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_KEPT_BYTES = 4 << 20
"""Largest number of bytes of cached grammars and cached error messages together."""
REFUSAL_SECONDS = 60.0
"""Seconds for which the refusal of a form is cached. A form that ran out of compile time may succeed at a later try,
because compile time depends on the machine's load.
"""
MAX_REASON = 500
"""Largest number of characters of an error message about a form."""
NUM_COMPILERS = 2
MAX_MEMORY = 256 << 20
"""Largest number of data bytes of a compiling process, which starts with 13 MiB of data. Compiling a schema of 50 KB
with 1,800 properties takes 34 MiB. No tested form took more than 90 MiB within `MAX_SECONDS`.
"""


class FormError(ValueError):
    """The output form is invalid. The error message names the field, the fault and the fault's place in the form."""


class Forms:
    """Compiles output forms to grammars, and caches recently used grammars."""

    def __init__(self) -> None:
        # (grammar, error, time of compilation) by the form's digest, least recently used first.
        self._grammars: OrderedDict[bytes, tuple[str, str, float]] = OrderedDict()
        self._num_bytes = 0
        self._turns: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._compilers = LimitedProcesses(
            NUM_COMPILERS, "scheduler_service.frontend.forms.form_compiler", "compiles forms"
        )

    async def read(self, sampling: pb.SamplingParams, *, undeclared_keys: bool = True) -> str:
        """The grammar of a request's output form; "" if the request has no form. Raises FormError or RequestError.

        `undeclared_keys`: JSON outputs may have keys that the schema does not name. A request with `strict` forbids
          undeclared keys in any case.
        """
        kind = sampling.WhichOneof("constraint")
        if kind is None:
            return ""
        closes_objects = kind == "json_schema" and (sampling.strict or not undeclared_keys)
        form = json.dumps([kind, closes_objects, *_texts(kind, sampling)]).encode()
        digest = hashlib.sha256(form).digest()
        turn = self._turns.setdefault(digest, asyncio.Lock())
        # Requests with the same form wait for the first of them to compile it. If the first request's client
        # disconnects, the next request compiles the form.
        async with turn:
            grammar, error, found_at = self._grammars.get(digest, ("", "", 0.0))
            if grammar or (error and time.monotonic() - found_at < REFUSAL_SECONDS):
                self._grammars.move_to_end(digest)
            else:
                grammar, error = await self._compilers.run(lambda compiler: _compile(compiler, form))
                self._keep(digest, grammar, error)
        if error:
            raise FormError(f"sampling.{kind} cannot be followed: {error}")
        return grammar

    def _keep(self, digest: bytes, grammar: str, error: str) -> None:
        _, old, _ = self._grammars.pop(digest, ("", "", 0.0))  # an expired refusal
        self._grammars[digest] = grammar, error, time.monotonic()
        self._num_bytes += len(grammar) + len(error) - len(old)
        while self._num_bytes > MAX_KEPT_BYTES:
            _, (grammar, error, _) = self._grammars.popitem(last=False)
            self._num_bytes -= len(grammar) + len(error)


def _compile(compiler: LimitedProcess, form: bytes) -> tuple[str, str]:
    try:
        grammar, error = json.loads(compiler.ask(form, Limits(MAX_SECONDS, MAX_MEMORY)))
    except LimitError as limit:
        grammar, error = "", f"{limit} to compile"
    return ("", _short(error)) if error else (grammar, "")


def _texts(kind: str, sampling: pb.SamplingParams) -> Sequence[str]:
    """The schema, regex, grammar or choices of a request, as texts. Raises FormError if a text is empty or too long."""
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


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"
