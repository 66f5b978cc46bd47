"""LoRA adapters of a worker with several ranks. The first rank broadcasts an adapter in pieces between steps, and
`hold` completes it. One thread of the first rank sends adapters and steps, so all ranks choose equal slots. With
different slots, ranks would mix adapters or block forever in an all-reduce."""

import json
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from worker_service.execution.adapters.adapters import Adapters
from worker_service.loading.adapter import Adapter
from worker_service.parallel.ranks import BETWEEN_STEPS, Ranks

PIECE_BYTES = 2 << 20
"""Maximum bytes of a piece; a single larger projection is one piece. A broadcast delays the next step by 5 to 9 ms,
measured on two shared cores."""


def hand_over(ranks: Ranks, piece: Adapter) -> None:
    """Broadcast some projections of an adapter to the other ranks."""
    with ranks.together():
        _send(ranks, piece=[(name, len(a)) for name, (a, _) in piece.halves.items()])
        ranks.broadcast(torch.cat([half.flatten() for half in chain(*piece.halves.values())]))


def abandon(ranks: Ranks) -> None:
    """Make the other ranks drop the received pieces of an incomplete adapter."""
    _send(ranks, abandon=True)


def hold(ranks: Ranks, adapters: Adapters, fingerprint: str, own: Adapter) -> None:
    """Store an adapter in all ranks, after the last piece. own: the first rank's part."""
    _send(ranks, hold=fingerprint)
    adapters.add(fingerprint, own)


def drop(ranks: Ranks, adapters: Adapters, fingerprint: str) -> None:
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
        # This rank's parts of an adapter whose pieces are still arriving.
        self._coming: dict[str, tuple[Tensor, Tensor]] = {}

    def follow(self, message: bytes) -> None:
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
        """Receive a piece, and return this rank's part. projections: names and LoRA ranks."""
        shapes = self._adapters.shapes
        sizes = [(name, rank, *shapes[name]) for name, rank in projections]
        lengths = [length for _, rank, outputs, inputs in sizes for length in (rank * inputs, outputs * rank)]
        flat = self._ranks.broadcast(torch.empty(sum(lengths), dtype=self._adapters.dtype))
        halves = iter(torch.split(flat, lengths))
        whole = {name: (next(halves).view(rank, -1), next(halves).view(-1, rank)) for name, rank, *_ in sizes}
        return Adapter(whole).part(self._adapters.cuts)
