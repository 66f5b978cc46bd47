"""Compiles the output form of a request (JSON schema, regex, choice or grammar) to a grammar, which workers use to mask
tokens, and caches grammars.
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
"""Bytes of cached grammars and cached errors together."""
REFUSAL_SECONDS = 60.0
"""Seconds for which a refusal is cached: compile time depends on the machine's load."""
MAX_REASON = 500
NUM_COMPILERS = 2
MAX_MEMORY = 256 << 20
"""Data bytes of a compiling process, which starts with 13 MiB. A schema of 50 KB with 1,800 properties takes 34 MiB. No
tested form took more than 90 MiB within `MAX_SECONDS`.
"""


class FormError(ValueError):
    """The output form is invalid. The message names the field, the fault and its place in the form."""


class Forms:
    """Compiles output forms to grammars, and caches recently used grammars.

    `module`: the program of the compiling processes, which receive the bytes `setup` first.
    """

    def __init__(
        self,
        module: str = "scheduler_service.frontend.forms.form_compiler",
        does: str = "compiles forms",
        setup: bytes = b"",
    ) -> None:
        # (grammar, error, time of compilation) by the form's digest, least recently used first.
        self._grammars: OrderedDict[bytes, tuple[str, str, float]] = OrderedDict()
        self._num_bytes = 0
        self._turns: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._compilers = LimitedProcesses(NUM_COMPILERS, module, does, setup)

    async def read(self, sampling: pb.SamplingParams, *, undeclared_keys: bool = True) -> str:
        """The grammar of a request's output form. Raises FormError or RequestError.

        `undeclared_keys`: JSON outputs may have keys that the schema does not name, unless the request sets `strict`.
        """
        kind = sampling.WhichOneof("constraint")
        assert kind is not None
        closes_objects = kind == "json_schema" and (sampling.strict or not undeclared_keys)
        grammar, error = await self.compiled(json.dumps([kind, closes_objects, *form_texts(kind, sampling)]).encode())
        if error:
            raise FormError(f"sampling.{kind} cannot be followed: {error}")
        return grammar

    async def compiled(self, form: bytes) -> tuple[str, str]:
        """The grammar for a message to a compiling process, and an error message. Raises RequestError."""
        digest = hashlib.sha256(form).digest()
        turn = self._turns.setdefault(digest, asyncio.Lock())
        # Requests with the same form wait for the first. If its client disconnects, the next request compiles the form.
        async with turn:
            grammar, error, found_at = self._grammars.get(digest, ("", "", 0.0))
            if grammar or (error and time.monotonic() - found_at < REFUSAL_SECONDS):
                self._grammars.move_to_end(digest)
            else:
                grammar, error = await self._compilers.run(lambda compiler: _compile(compiler, form))
                self._keep(digest, grammar, error)
        return grammar, error

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


def form_texts(kind: str, sampling: pb.SamplingParams) -> Sequence[str]:
    """The texts of an output form. Raises FormError if they are empty or too large."""
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
