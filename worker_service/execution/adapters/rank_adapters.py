"""LoRA adapters in several ranks. Each rank stores its part of every adapter. All ranks add or drop an adapter between
the same two steps.

The first rank reads and checks an adapter while steps run. The first rank then broadcasts the adapter in pieces, each
piece between two steps. A last message completes the adapter. One thread sends both adapters and steps, so all ranks
receive them in one order. Every rank therefore stores an adapter before it receives a step that names the adapter.
Slots depend only on adapters and steps, so all ranks choose equal slots. With different slots, ranks would apply
different adapters, or block forever in a sum over ranks.
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
"""Maximum bytes of a piece with several projections. A piece delays a step by 5 to 9 ms, measured on two cores shared
with other programs.
"""


def hand_over(ranks: Ranks, piece: Adapter) -> None:
    """Broadcast a piece to the other ranks. A piece has some projections of the adapter, for all ranks."""
    with ranks.together():
        _send(ranks, piece=[(name, len(a)) for name, (a, _) in piece.halves.items()])
        ranks.broadcast(torch.cat([half.flatten() for half in chain(*piece.halves.values())]))


def abandon(ranks: Ranks) -> None:
    """Make the other ranks drop the pieces of an incomplete adapter."""
    _send(ranks, abandon=True)


def hold(ranks: Ranks, adapters: Adapters, fingerprint: str, own: Adapter) -> None:
    """Add an adapter in all ranks. The other ranks must have received all pieces of the adapter.

    own: this rank's part of the adapter.
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
    """Stores the adapters of a rank that is not the first."""

    def __init__(self, ranks: Ranks, adapters: Adapters) -> None:
        self._ranks = ranks
        self._adapters = adapters
        # This rank's parts of the incomplete adapter.
        self._coming: dict[str, tuple[Tensor, Tensor]] = {}

    def follow(self, message: bytes) -> None:
        """Repeat the first rank's operation, which `message` names."""
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
        """Receive a piece, and return this rank's part of the piece.

        projections: for each projection its name and its LoRA rank (number of inner units).
        """
        shapes = self._adapters.shapes
        sizes = [(name, rank, *shapes[name]) for name, rank in projections]
        lengths = [length for _, rank, outputs, inputs in sizes for length in (rank * inputs, outputs * rank)]
        flat = self._ranks.broadcast(torch.empty(sum(lengths), dtype=self._adapters.dtype))
        halves = iter(torch.split(flat, lengths))
        whole = {name: (next(halves).view(rank, -1), next(halves).view(-1, rank)) for name, rank, *_ in sizes}
        return Adapter(whole).part(self._adapters.cuts)
