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
from torch import Tensor

from worker_service.execution.adapters.adapters import Adapters
from worker_service.loading.adapter import Adapter
from worker_service.parallel.ranks import BETWEEN_STEPS, Ranks

PIECE_BYTES = 2 << 20
"""Of a piece, if it has several projections. It delays a step by 5 to 9 ms on two cores that other programs use too."""


def hand_over(ranks: Ranks, piece: Adapter) -> None:
    """Give the other ranks the next piece, which is of the whole adapter."""
    with ranks.alike():
        _send(ranks, piece=[(name, len(a)) for name, (a, _) in piece.halves.items()])
        ranks.broadcast(torch.cat([half.flatten() for half in chain(*piece.halves.values())]))


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
        self._coming: dict[str, tuple[Tensor, Tensor]] = {}  # own parts of the one adapter that is under way

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
        shapes = self._adapters.shapes
        sizes = [(name, rank, *shapes[name]) for name, rank in projections]
        lengths = [length for _, rank, outputs, inputs in sizes for length in (rank * inputs, outputs * rank)]
        flat = self._ranks.broadcast(torch.empty(sum(lengths), dtype=self._adapters.dtype))
        halves = iter(torch.split(flat, lengths))
        whole = {name: (next(halves).view(rank, -1), next(halves).view(-1, rank)) for name, rank, *_ in sizes}
        return Adapter(whole).part(self._adapters.cuts)
