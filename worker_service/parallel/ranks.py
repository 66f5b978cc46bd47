"""One rank's view of the processes that form a worker: what it adds up, joins and agrees on with the others.

Every collective is entered by all ranks, in the same order. Numbers, steps and adapters go over Gloo; a step's tensors
go over NCCL where they lie on GPUs. There is no time limit, because ranks wait for the next step as long as it takes.
When a rank dies, `launcher` ends the others, wherever they wait.
"""

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
"""Bytes that are sent to the other ranks at once; a steady step of 256 sequences is under 2 KB."""
_HEADER_BYTES = 24
BETWEEN_STEPS = 0
"""In place of an epoch, and no session's: the message is not a step."""


class Ranks:
    """The ranks of a worker. With a size of 1 nothing is ever sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, with the same bits in each; takes the place of x. x: contiguous."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x one beside the other. x: [rows, columns]; returns [rows, size * columns]."""
        if self.size == 1:
            return x
        if not len(x):
            return x.repeat(1, self.size)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's x, in all ranks; takes the place of x. x: contiguous, in host memory."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def gather_numbers(self, number: int) -> list[int]:
        """The numbers that the ranks pass, in the order of the ranks."""
        if self.size == 1:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]))
        return [int(other) for other in numbers]

    def send(self, epoch: int, message: bytes, drafts: Sequence["array[int]"] = ()) -> None:
        """Send a step from the first rank to all others, of which there is at least one, and each chunk's drafts.

        epoch: of the step, or `BETWEEN_STEPS` with another message.
        """
        drafted = (
            array("q", chain.from_iterable((len(draft), *draft) for draft in drafts)).tobytes() if any(drafts) else b""
        )
        header = b"".join(number.to_bytes(8, "little") for number in (epoch, len(message), len(drafted)))
        content = header + message + drafted
        packet, rest = content[:_PACKET_BYTES].ljust(_PACKET_BYTES, b"\0"), content[_PACKET_BYTES:]
        with self.alike():
            dist.broadcast(torch.frombuffer(bytearray(packet), dtype=torch.uint8), 0)
            if rest:
                dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0)

    def receive(self) -> "tuple[int, bytes, list[array[int]]] | None":
        """Wait for the first rank's next step: its epoch, the message, and each chunk's drafts, if there are any of
        one; or for another message, whose epoch is `BETWEEN_STEPS`. None once that rank is gone."""
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
    def alike(self) -> Iterator[None]:
        """Around work that all ranks do together. A rank that fails is out of step: it ends, and the others with it.

        InvalidStepError passes: all ranks raise it for the same step, before one of them waits for the others.
        """
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
"""A worker that is one process."""


def join_ranks(size: int, device: torch.device) -> Ranks:
    """Meet the other ranks; returns when all are there. Raises StartError if their number is wrong.

    device: where this rank's tensors lie.
    """
    if size == 1:
        return ALONE
    if (started := int(os.environ["WORLD_SIZE"])) != size:
        raise StartError(f"--tensor-parallel-size is {size}, and {started} ranks were started")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_FOREVER)
    return Ranks(dist.get_rank(), size)
