"""Communication between the ranks of a worker.

All ranks call every collective operation, in the same order. Numbers, steps and adapters are sent with Gloo, and on
GPUs a step's tensors with NCCL. Operations have no time limit, because the next step may take long to arrive. If a rank
dies, the launcher ends the other ranks."""

import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.errors import InvalidStepError

log = logging.getLogger(__name__)

_FOREVER = timedelta(days=365)
_PACKET_BYTES = 4096
"""Bytes of a message's first broadcast; longer messages need a second. A decode step of 256 sequences has less than 2
KB."""
_HEADER_BYTES = 24
BETWEEN_STEPS = 0
"""The epoch of a message that is not a step. No session has this epoch."""


class Ranks:
    """One rank's connection to all ranks. With a single rank, nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x, a contiguous tensor, by its sum over all ranks, with the same bits in each."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate x, [rows, columns], of all ranks. Returns [rows, size * columns]."""
        if self.size == 1:
            return x
        if not len(x):
            return x.repeat(1, self.size)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace x by x of the first rank. x: a contiguous tensor in host memory."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def gather_numbers(self, number: int) -> list[int]:
        """Exchange one number. Returns the numbers in the order of the ranks."""
        if self.size == 1:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]))
        return [int(other) for other in numbers]

    def send(self, epoch: int, message: bytes, drafts: Sequence["array[int]"] = ()) -> None:
        """Send a message from the first rank to all others, of which at least one must exist.

        epoch: of the step, or `BETWEEN_STEPS`. drafts: of each chunk of a step."""
        drafted = (
            array("q", chain.from_iterable((len(draft), *draft) for draft in drafts)).tobytes() if any(drafts) else b""
        )
        header = b"".join(number.to_bytes(8, "little") for number in (epoch, len(message), len(drafted)))
        content = header + message + drafted
        packet, rest = content[:_PACKET_BYTES].ljust(_PACKET_BYTES, b"\0"), content[_PACKET_BYTES:]
        with self.together():
            dist.broadcast(torch.frombuffer(bytearray(packet), dtype=torch.uint8), 0)
            if rest:
                dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0)

    def receive(self) -> "tuple[int, bytes, list[array[int]]] | None":
        """Wait for the next message: its epoch, the message, and the drafts of each chunk. None if the first rank has
        ended.

        The list of drafts is empty if no chunk has drafts."""
        packet = torch.empty(_PACKET_BYTES, dtype=torch.uint8)
        try:
            dist.broadcast(packet, 0)
        except RuntimeError:
            return None
        content = packet.numpy().tobytes()
        epoch, length, drafted = (int.from_bytes(content[begin : begin + 8], "little") for begin in (0, 8, 16))
        num_bytes = _HEADER_BYTES + length + drafted
        if num_bytes > _PACKET_BYTES:
            rest = torch.empty(num_bytes - _PACKET_BYTES, dtype=torch.uint8)
            dist.broadcast(rest, 0)
            content += rest.numpy().tobytes()
        message = content[_HEADER_BYTES : _HEADER_BYTES + length]
        numbers = iter(array("q", content[_HEADER_BYTES + length : num_bytes]))
        return epoch, message, [array("q", islice(numbers, number)) for number in numbers]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for work of all ranks. An error ends this rank's process, and so the worker, because the rank
        cannot take part in further collective operations.

        InvalidStepError does not end the process, because all ranks raise the error for the same step, before waiting
        for each other."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except InvalidStepError:
            raise
        except Exception:
            log.exception("this rank failed in a step, and ends the worker")
            logging.shutdown()
            os._exit(1)


ALONE = Ranks(0, 1)
"""The `Ranks` of a worker that is one process."""


def join_ranks(size: int, device: torch.device) -> Ranks:
    """Connect this process with the other ranks. Raises StartError if the number of started ranks is not `size`."""
    if size == 1:
        return ALONE
    if (started := int(os.environ["WORLD_SIZE"])) != size:
        raise StartError(f"--tensor-parallel-size is {size}, and {started} ranks were started")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_FOREVER)
    return Ranks(dist.get_rank(), size)
