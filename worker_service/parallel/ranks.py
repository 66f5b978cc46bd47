"""The collectives of a worker's ranks: all-reduce, all-gather, broadcast and agreement.

All ranks call every collective, in the same order. Numbers, steps and adapters use Gloo. A step's tensors use NCCL on
GPUs. Collectives have no time limit, because the next step may arrive at any time. If a rank dies, the launcher ends
the other ranks, even if they wait in a collective.
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
"""Bytes of the first broadcast of a message. A step that decodes 256 sequences has less than 2 KB."""
_HEADER_BYTES = 24
BETWEEN_STEPS = 0
"""The epoch of a message that is not a step. No session has this epoch."""


class Ranks:
    """The ranks of a worker. If a worker has only one rank, the rank sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by the sum of all ranks' x, bit-identical in each rank. x: contiguous."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, concatenated along columns. x: shape [rows, columns]. Returns [rows, size * columns]."""
        if self.size == 1:
            return x
        if not len(x):
            return x.repeat(1, self.size)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace x by the first rank's x. x: contiguous, in host memory."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def gather_numbers(self, number: int) -> list[int]:
        """Each rank's number, in the order of the ranks."""
        if self.size == 1:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]))
        return [int(other) for other in numbers]

    def send(self, epoch: int, message: bytes, drafts: Sequence["array[int]"] = ()) -> None:
        """Send a step and each chunk's drafts from the first rank to all other ranks. Requires at least two ranks.

        epoch: the epoch of the step, or `BETWEEN_STEPS` for another message.
        """
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
        """Wait for the first rank's next message. Returns None after the first rank has ended.

        Returns the message's epoch, the message, and each chunk's drafts. The epoch is `BETWEEN_STEPS` if the message
        is not a step. The list of drafts is empty if no chunk has drafts.
        """
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
        """A context for work that all ranks do together. If one rank fails, the whole worker ends, because the failed
        rank cannot join further collectives.

        InvalidStepError passes through, because all ranks raise the error for the same step, before any rank waits for
        another rank.
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
"""The ranks of a worker that is one process."""


def join_ranks(size: int, device: torch.device) -> Ranks:
    """Join the other ranks. Returns when all ranks have joined. Raises StartError if the number of ranks is wrong.

    device: the device of this rank's tensors.
    """
    if size == 1:
        return ALONE
    if (started := int(os.environ["WORLD_SIZE"])) != size:
        raise StartError(f"--tensor-parallel-size is {size}, and {started} ranks were started")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_FOREVER)
    return Ranks(dist.get_rank(), size)
