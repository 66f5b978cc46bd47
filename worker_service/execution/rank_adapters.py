"""Adapters in several ranks: each holds its part of every one, and all begin and cease to hold it between the same
steps.

The first rank reads and checks an adapter beside the steps. It then hands it over in pieces, each between two steps,
and says when it has come whole. All this goes the way that steps go, on the thread that sends them. So a rank holds an
adapter before it is sent a step that names it; and slots, which follow from what is held and from the steps, are the
same in all ranks. Where they were not, ranks would apply different adapters, or wait for a sum that never comes.
"""

import json
from collections.abc import Sequence
from itertools import chain

import torch

from worker_service.execution.adapters import Adapters
from worker_service.loading.adapter import Adapter
from worker_service.parallel.ranks import BETWEEN_STEPS, Ranks

PIECE_BYTES = 4 << 20
"""Of a piece of several projections. It delays a step by 3 to 8 ms on two busy cores."""


def hand_over(ranks: Ranks, piece: Adapter) -> None:
    """Give the other ranks the next piece, which is of the whole adapter."""
    with ranks.alike():
        _send(ranks, piece=[(name, len(a)) for name, (a, _) in piece.halves.items()])
        for half in chain(*piece.halves.values()):
            ranks.broadcast(half)


def abandon(ranks: Ranks) -> None:
    """Have the other ranks forget the pieces that have come so far."""
    _send(ranks, abandon=True)


def hold(ranks: Ranks, adapters: Adapters, fingerprint: str, own: Adapter) -> None:
    """Hold an adapter, whose pieces the other ranks have all been given. own: this rank's part."""
    _send(ranks, hold=fingerprint)
    adapters.add(fingerprint, own)


def drop(ranks: Ranks, adapters: Adapters, fingerprint: str) -> None:
    """Cease to hold an adapter."""
    _send(ranks, drop=fingerprint)
    adapters.remove(fingerprint)


def _send(ranks: Ranks, **order: object) -> None:
    if ranks.size > 1:
        ranks.send(BETWEEN_STEPS, json.dumps(order).encode())


class AdapterFollower:
    """The adapters of a rank that is not the first."""

    def __init__(self, ranks: Ranks, adapters: Adapters) -> None:
        self._ranks = ranks
        self._adapters = adapters
        self._coming = dict[
            str, tuple[torch.Tensor, torch.Tensor]
        ]()  # own parts, of the only adapter that is under way

    def follow(self, message: bytes) -> None:
        """Do what the first rank did when it sent this."""
        with self._ranks.alike():
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
        """This rank's part of a piece. projections: their names, and their numbers of inner units."""
        shapes, dtype = self._adapters.shapes, self._adapters.dtype
        halves = {}
        for name, rank in projections:
            outputs, inputs = shapes[name]
            a = self._ranks.broadcast(torch.empty(rank, inputs, dtype=dtype))
            halves[name] = a, self._ranks.broadcast(torch.empty(outputs, rank, dtype=dtype))
        return Adapter(halves).part(self._adapters.cuts)
