"""Messages between a worker and its reader process. A question is a pickled header, and a file. An answer is a pickled
header, and the elements of tensors one after the other, so that neither side copies them."""

import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker_service.models.images.embeddings import Pixels

Read = Callable[[bytes, int, int], Sequence[Pixels]]
"""See `PixelReader.read`."""
_LENGTH = struct.Struct("=Q")


class Question(NamedTuple):
    """`read`: a pickled `Read`. Without bytes of a file, the process only loads its code."""

    read: bytes
    num_bytes: int
    width: int
    height: int


class Answer(NamedTuple):
    """`parts`: names, types and shapes of each part's tensors. `error`: empty if the file was read."""

    parts: Sequence[Sequence[tuple[str, torch.dtype, tuple[int, ...]]]]
    error: str = ""


def send(connection: socket.socket, header: Question | Answer, *data: Any) -> None:
    """Send a header and objects with the buffer interface. Raises OSError."""
    pickled = pickle.dumps(header)
    connection.sendall(_LENGTH.pack(len(pickled)) + pickled)
    for each in data:
        connection.sendall(each)


def receive(connection: socket.socket) -> Any:
    """Receive a header. Raises OSError, and EOFError if the other side has ended."""
    length = bytearray(_LENGTH.size)
    receive_into(connection, length)
    pickled = bytearray(_LENGTH.unpack(length)[0])
    receive_into(connection, pickled)
    return pickle.loads(pickled)  # noqa: S301 (no third process can write here)


def receive_into(connection: socket.socket, buffer: Any) -> None:
    """Fill a writable buffer. The system waits for all bytes, so that this thread needs Python's lock only once."""
    view = memoryview(buffer)
    while view:
        if not (number := connection.recv_into(view, 0, socket.MSG_WAITALL)):
            raise EOFError("the other side has ended")
        view = view[number:]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
