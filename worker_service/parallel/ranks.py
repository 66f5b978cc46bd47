"""One rank's view of the processes that form a worker: what it adds up, joins and agrees on with the others.

Every collective is entered by all ranks, in the same order. Numbers and steps go over Gloo; tensors go over NCCL where
they lie on GPUs. There is no time limit, because ranks wait for the next step as long as it takes. When a rank dies,
`launcher` ends the others, wherever they wait.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pagewire_common.start_error import StartError

log = logging.getLogger(__name__)

_FOREVER = timedelta(days=365)
_PACKET_BYTES = 4096
"""Bytes that are sent to the other ranks at once; a steady step of 256 sequences is under 2 KB."""
_HEADER_BYTES = 16


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

    def gather_numbers(self, number: int) -> list[int]:
        """The numbers that the ranks pass, in the order of the ranks."""
        if self.size == 1:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]))
        return [int(other) for other in numbers]

    def send(self, epoch: int, message: bytes) -> None:
        """Send a step from the first rank to all others, of which there is at least one."""
        header = epoch.to_bytes(8, "little") + len(message).to_bytes(8, "little")
        first = _PACKET_BYTES - _HEADER_BYTES
        packet = (header + message[:first]).ljust(_PACKET_BYTES, b"\0")
        with self.alike():
            dist.broadcast(torch.frombuffer(bytearray(packet), dtype=torch.uint8), 0)
            if rest := message[first:]:
                dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0)

    def receive(self) -> tuple[int, bytes] | None:
        """Wait for the first rank's next step; None once it is gone."""
        packet = torch.empty(_PACKET_BYTES, dtype=torch.uint8)
        try:
            dist.broadcast(packet, 0)
        except RuntimeError:
            return None
        content = packet.numpy().tobytes()
        epoch, length = (int.from_bytes(content[begin : begin + 8], "little") for begin in (0, 8))
        message = content[_HEADER_BYTES : _HEADER_BYTES + length]
        if len(message) < length:
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            dist.broadcast(rest, 0)
            message += rest.numpy().tobytes()
        return epoch, message

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Around work that all ranks do together. A rank that fails is out of step: it ends, and the others with it."""
        if self.size == 1:
            yield
            return
        try:
            yield
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
