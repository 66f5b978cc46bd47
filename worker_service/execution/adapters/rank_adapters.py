"""LoRA adapters of a worker that consists of several ranks. Each rank stores its part of every adapter. All ranks add
or drop an adapter between the same two steps.

The first rank reads and checks an adapter while steps run. The first rank then broadcasts the adapter's weights in
pieces, each piece between two steps. A message `hold` after the last piece completes the adapter. One thread of the
first rank sends both adapters and steps, so all ranks receive adapters and steps in one order. Because of this order,
every rank stores an adapter before it receives a step that names the adapter. Each rank chooses the adapters' slots
only by the adapters and steps that it has received, so all ranks choose equal slots. If ranks chose different slots,
they would apply different adapters to one row, or block forever in an all-reduce.
"""

import json
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from worker_service.execution.adapters.adapters import Adapters
from worker_service.loading.adapter import Adapter
from worker_service.parallel.ranks import BETWEEN_STEPS, Ranks

PIECE_BYTES = 2 << 20
"""Maximum bytes of a piece of an adapter. A single larger projection is a piece of its own. Broadcasting a piece delays
the next step by 5 to 9 ms, measured on two cores shared with other programs.
"""


def hand_over(ranks: Ranks, piece: Adapter) -> None:
    """Broadcast a piece of an adapter to the other ranks. A piece contains some projections of the whole adapter."""
    with ranks.together():
        _send(ranks, piece=[(name, len(a)) for name, (a, _) in piece.halves.items()])
        ranks.broadcast(torch.cat([half.flatten() for half in chain(*piece.halves.values())]))


def abandon(ranks: Ranks) -> None:
    """Make the other ranks drop the pieces that they have received of an incomplete adapter."""
    _send(ranks, abandon=True)


def hold(ranks: Ranks, adapters: Adapters, fingerprint: str, own: Adapter) -> None:
    """Store an adapter in all ranks, after the other ranks have received all pieces of the adapter.

    own: the first rank's part of the adapter.
    """
    _send(ranks, hold=fingerprint)
    adapters.add(fingerprint, own)


def drop(ranks: Ranks, adapters: Adapters, fingerprint: str) -> None:
    """Drop an adapter in all ranks."""
    _send(ranks, drop=fingerprint)
    adapters.remove(fingerprint)


def _send(ranks: Ranks, **order: object) -> None:
    if ranks.size > 1:
        ranks.send(BETWEEN_STEPS, json.dumps(order).encode())


class AdapterFollower:
    """Stores the adapters that a rank receives from the first rank."""

    def __init__(self, ranks: Ranks, adapters: Adapters) -> None:
        self._ranks = ranks
        self._adapters = adapters
        # The parts that this rank has stored of an adapter whose pieces are still arriving.
        self._coming: dict[str, tuple[Tensor, Tensor]] = {}

    def follow(self, message: bytes) -> None:
        """Do with an adapter what the first rank has done: `message` names the operation."""
        with self._ranks.together():
            match json.loads(message):
                case {"piece": projections}:
                    self._coming |= self._receive(projections).halves
                case {"hold": fingerprint}:
                    self._adapters.add(fingerprint, Adapter(self._coming))
                    self._coming = {}
                case {"drop": fingerprint}:
                    self._adapters.remove(fingerprint)
                case {"abandon": _}:
                    self._coming = {}

    def _receive(self, projections: Sequence[tuple[str, int]]) -> Adapter:
        """Receive a piece of an adapter, and return the part of the piece that this rank stores.

        projections: the name and the LoRA rank (number of inner units) of each projection in the piece.
        """
        shapes = self._adapters.shapes
        sizes = [(name, rank, *shapes[name]) for name, rank in projections]
        lengths = [length for _, rank, outputs, inputs in sizes for length in (rank * inputs, outputs * rank)]
        flat = self._ranks.broadcast(torch.empty(sum(lengths), dtype=self._adapters.dtype))
        halves = iter(torch.split(flat, lengths))
        whole = {name: (next(halves).view(rank, -1), next(halves).view(-1, rank)) for name, rank, *_ in sizes}
        return Adapter(whole).part(self._adapters.cuts)
