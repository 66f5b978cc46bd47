"""Reads images and sounds in a process of their own, which a file may kill, and whose Python does not delay steps.

Tensors come through a socket pair: the system copies 144 MiB twice in 0.2 s (loaded machine), without Python's lock."""

import contextlib
import pickle
import socket
import struct
import subprocess
import weakref
from collections.abc import Sequence
from functools import cache
from threading import Event

import structlog
import torch

from pagewire_common.processes.child_process import start_child
from worker_service.execution.images import reader_messages as messages
from worker_service.execution.images.background import BackgroundThread
from worker_service.models.images.embeddings import Pixels

log = structlog.get_logger()

MAX_KILLS = 2
"""How often the process may end while it reads a file, which may be the cause."""
MAX_STARTS = 5
"""Starts of the process for one file, if it ends before it has loaded its code."""
DEAF_SECONDS = 300
"""Seconds without an answer after which the process counts as stuck. Usual: 3 s to start, and 2 s for the largest
image; several times as long on busy machines."""
_MODULE = "worker_service.execution.images.reader_program"


@cache
def reader_process() -> "ReaderProcess":
    """The only reader process of this process."""
    return ReaderProcess()


class ReaderProcess:
    """A process that starts with `begin` or the first file, and again after it was killed. May be used by any thread.
    The process has the low priority of background threads."""

    def __init__(self) -> None:
        # The system kills the process when the thread ends that started it.
        self._thread = BackgroundThread("reader")
        self._connection: socket.socket | None = None
        self._end: weakref.finalize[..., ReaderProcess]
        self.process: subprocess.Popen[bytes] | None = None
        self.has_started = Event()

    def begin(self, read: messages.Read) -> messages.Read:
        """Start the process, and load the code of a function that can be pickled. Returns a function that calls it in
        the process, and raises ValueError if it raises an error, or if the process is killed twice. It calls `read`
        here until the process has started for the first time, which takes seconds."""
        pickled = pickle.dumps(read)

        def read_there(data: bytes, width: int, height: int) -> Sequence[Pixels]:
            if not self.has_started.is_set():
                return read(data, width, height)
            return self._thread.submit(lambda: self._read(pickled, data, width, height)).result()

        self._thread.submit(lambda: self._read(pickled, b"", 0, 0))
        return read_there

    def _read(self, read: bytes, data: bytes, width: int, height: int) -> Sequence[Pixels]:
        for _ in range(MAX_KILLS):
            connection = self._running(read)
            if not data:
                return []
            try:
                return self._ask(connection, messages.Question(read, len(data), width, height), data)
            except (OSError, EOFError) as error:
                self._close()
                log.warning("the process that reads images was killed or did not answer", reason=str(error))
        raise ValueError("the process that reads images was killed or did not answer")

    def _running(self, read: bytes) -> socket.socket:
        """The connection to the process, which has loaded its code. Raises ValueError if it cannot be started."""
        if self._connection is not None and self.process is not None and self.process.poll() is None:
            return self._connection
        for _ in range(MAX_STARTS):
            self._close()
            try:
                connection = self._start()
                self._ask(connection, messages.Question(read, 0, 0, 0), b"")
                self.has_started.set()
                return connection
            except (OSError, EOFError) as error:
                log.warning("the process that reads images did not start", reason=str(error))
        self._close()
        raise ValueError("the process that reads images does not start")

    def _ask(self, connection: socket.socket, question: messages.Question, data: bytes) -> Sequence[Pixels]:
        messages.send(connection, question, data)
        answer: messages.Answer = messages.receive(connection)
        if answer.error:
            raise ValueError(answer.error)
        parts = [{name: torch.empty(shape, dtype=dtype) for name, dtype, shape in part} for part in answer.parts]
        for part in parts:
            for tensor in part.values():
                messages.receive_into(connection, messages.bytes_of(tensor))
        return parts

    def _start(self) -> socket.socket:
        self.process, self._connection = start_child(_MODULE)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", DEAF_SECONDS, 0))
        self._end = weakref.finalize(self, _end, self.process, self._connection)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection = None
            self._end()


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
