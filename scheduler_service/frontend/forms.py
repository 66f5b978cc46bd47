"""The form that a request's output must have: read, and checked as the worker will read it, before a worker is asked.

llguidance compiles forms to grammars, in processes that are ended when they take too long: form_compiler.py. There are
two, so that a form waits for the one that is compiled before it only if there is another one. Each text is compiled
once, also where several requests bring it at the same time. The worker, which knows the tokens, follows the grammar:
worker_service/execution/forms.py.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
import subprocess
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import grpc
import structlog

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.child_process import start_child
from pagewire_common.errors import RequestError

log = structlog.get_logger()

MAX_FORM_BYTES = 64 << 10
MAX_CHOICES = 1024
MOST_KEPT_BYTES = 4 << 20
"""Of grammars that are kept, and of reasons why there are none."""
MOST_REASON = 500
"""Characters of what is wrong with a form."""
NUM_COMPILERS = 2
MOST_STARTS = 2
"""For one form. A process that is killed from outside is not the form's fault; one that is killed again may be."""
DEAF_SECONDS = 30
"""A process that does not answer for so long is stuck: it starts in 0.1 s, and a form ends it after 0.3, of a
processor's time."""


class FormError(ValueError):
    """The form cannot be followed; names the field and what is wrong with it, and where."""


class Forms:
    """Grammars of forms, those that were asked for lately at once."""

    def __init__(self) -> None:
        # Each with what is wrong with it, by digests; the one that was used last is last.
        self._grammars: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._num_bytes = 0
        self._turns: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._threads = ThreadPoolExecutor(NUM_COMPILERS, "forms")
        self._idle = [FormCompiler() for _ in range(NUM_COMPILERS)]

    async def read(self, sampling: pb.SamplingParams, *, undeclared_keys: bool = True) -> str:
        """The grammar of a request's form, "" if it has none. Raises FormError, RequestError.

        Unless the form is strict, `undeclared_keys` says whether JSON may have keys that its schema does not name.
        """
        kind = sampling.WhichOneof("constraint")
        if kind is None:
            return ""
        closes_objects = kind == "json_schema" and (sampling.strict or not undeclared_keys)
        form = json.dumps([kind, closes_objects, *_texts(kind, sampling)]).encode()
        digest = hashlib.sha256(form).digest()
        turn = self._turns.setdefault(digest, asyncio.Lock())
        async with turn:  # requests with the same form find its grammar, or compile it if the client before has left
            if digest in self._grammars:
                self._grammars.move_to_end(digest)
                grammar, error = self._grammars[digest]
            else:
                grammar, error = await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, form)
                self._keep(digest, grammar, error)
        if error:
            raise FormError(f"sampling.{kind} cannot be followed: {error}")
        return grammar

    def _compile(self, form: bytes) -> tuple[str, str]:
        compiler = self._idle.pop()  # the one that was used last: the other may never be needed
        try:
            grammar, error = json.loads(compiler.compile(form))
        finally:
            self._idle.append(compiler)
        return ("", _short(error)) if error else (grammar, "")

    def _keep(self, digest: bytes, grammar: str, error: str) -> None:
        self._grammars[digest] = grammar, error
        self._num_bytes += len(grammar) + len(error)
        while self._num_bytes > MOST_KEPT_BYTES:
            _, oldest = self._grammars.popitem(last=False)
            self._num_bytes -= sum(map(len, oldest))


class FormCompiler:
    """A process that compiles forms, from the first one on, and another one when it has ended. For one thread."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._end: weakref.finalize[..., FormCompiler]

    def compile(self, form: bytes) -> bytes:
        """What form_compiler.py answers to a form. Raises RequestError."""
        for _ in range(MOST_STARTS):
            try:
                connection = self._connection or self._start()
                connection.send_bytes(form)
                return connection.recv_bytes()
            except (OSError, EOFError) as error:
                log.warning("the process that compiles forms is started anew", reason=str(error) or "it was killed")
                self.close()
        raise RequestError(
            grpc.StatusCode.UNAVAILABLE,
            "the form could not be compiled: the process that compiles forms was killed or did not answer; try again",
        )

    def close(self) -> None:
        """End the process, if there is one."""
        if self._connection is not None:
            self._connection = None
            self._end()

    def _start(self) -> Connection:
        process, control = start_child("scheduler_service.frontend.form_compiler")
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            control.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", DEAF_SECONDS, 0))
        self._connection = Connection(control.detach())
        self._end = weakref.finalize(self, _end, process, self._connection)
        return self._connection


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def _texts(kind: str, sampling: pb.SamplingParams) -> Sequence[str]:
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


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MOST_REASON else f"{line[:MOST_REASON]}…"
