"""Adapters in several ranks: each rank holds its part of every adapter, and all load or drop it between the same steps.

The first rank reads and checks an adapter while steps run. It then broadcasts the adapter in pieces, each between two
steps, and a last message when the adapter is complete. These messages use the same thread and order as steps. So every
rank holds an adapter before it receives a step that names it. Slots depend only on adapters and steps, so they are
equal in all ranks. With different slots, ranks would apply different adapters, or wait for a sum that never comes.
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
"""Bytes of a piece with several projections. A piece delays a step by 5 to 9 ms on two cores shared with other
programs."""


def hand_over(ranks: Ranks, piece: Adapter) -> None:
    """Broadcast the next piece (of the whole adapter) to the other ranks."""
    with ranks.together():
        _send(ranks, piece=[(name, len(a)) for name, (a, _) in piece.halves.items()])
        ranks.broadcast(torch.cat([half.flatten() for half in chain(*piece.halves.values())]))


def abandon(ranks: Ranks) -> None:
    """Have the other ranks drop the pieces of an incomplete adapter."""
    _send(ranks, abandon=True)


def hold(ranks: Ranks, adapters: Adapters, fingerprint: str, own: Adapter) -> None:
    """Add an adapter whose pieces the other ranks all have. own: this rank's part."""
    _send(ranks, hold=fingerprint)
    adapters.add(fingerprint, own)


def drop(ranks: Ranks, adapters: Adapters, fingerprint: str) -> None:
    """Drop an adapter."""
    _send(ranks, drop=fingerprint)
    adapters.remove(fingerprint)


def _send(ranks: Ranks, **order: object) -> None:
    if ranks.size > 1:
        ranks.send(BETWEEN_STEPS, json.dumps(order).encode())


class AdapterFollower:
    """The adapters of a rank other than the first."""

    def __init__(self, ranks: Ranks, adapters: Adapters) -> None:
        self._ranks = ranks
        self._adapters = adapters
        self._coming: dict[str, tuple[Tensor, Tensor]] = {}  # this rank's parts of the incomplete adapter

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
        """This rank's part of a piece. projections: names and ranks (inner units)."""
        shapes = self._adapters.shapes
        sizes = [(name, rank, *shapes[name]) for name, rank in projections]
        lengths = [length for _, rank, outputs, inputs in sizes for length in (rank * inputs, outputs * rank)]
        flat = self._ranks.broadcast(torch.empty(sum(lengths), dtype=self._adapters.dtype))
        halves = iter(torch.split(flat, lengths))
        whole = {name: (next(halves).view(rank, -1), next(halves).view(-1, rank)) for name, rank, *_ in sizes}
        return Adapter(whole).part(self._adapters.cuts)
