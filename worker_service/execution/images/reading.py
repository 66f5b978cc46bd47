"""The reader process's work: it reads images and sounds for a worker. See `ReaderProcess`."""

import contextlib
import os
import pickle
import resource
import socket
from pathlib import Path

import torch
from torch import Tensor

from worker_service.execution.images import reader_messages as messages

MAX_BYTES = 4 << 30
"""Bytes of data that reading may take, beside what the process takes after its start. 33 million pixels that are
resized to few took 0.45 GB."""


def _answer(question: messages.Question, data: bytearray) -> tuple[messages.Answer, list[Tensor]]:
    try:
        read: messages.Read = pickle.loads(question.read)  # noqa: S301 (written by the worker)
        parts = read(bytes(data), question.width, question.height) if data else []
    # Files may be of any content, and transformers may raise any error for unusual sizes.
    except Exception as error:
        return messages.Answer([], f"{type(error).__name__}: {error}"), []
    kept = [{name: tensor.contiguous() for name, tensor in part.items()} for part in parts]
    shapes = [[(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part.items()] for part in kept]
    return messages.Answer(shapes), [tensor for part in kept for tensor in part.values()]


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Linux
        status = Path("/proc/self/status").read_text().split("VmData:")[1]
        resource.setrlimit(resource.RLIMIT_DATA, ((int(status.split()[0]) << 10) + MAX_BYTES,) * 2)


def answer_all() -> None:
    """Answer the questions that come through stdin, a socket, until the worker closes it."""
    torch.set_num_threads(1)
    with socket.socket(fileno=os.dup(0)) as connection, contextlib.suppress(EOFError, OSError):
        is_limited = False
        while True:
            question: messages.Question = messages.receive(connection)
            data = bytearray(question.num_bytes)
            messages.receive_into(connection, data)
            answer, tensors = _answer(question, data)
            messages.send(connection, answer, *map(messages.bytes_of, tensors))
            del data, tensors
            if not is_limited:
                _limit_memory()
                is_limited = True
