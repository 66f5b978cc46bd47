"""The LoRA adapters of one worker, in host memory and in slots on the device. Before a forward pass, missing adapters
are copied from host memory into slots, in place of the least recently used. No step waits for a file or the network."""

import itertools
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.inputs import upload
from worker_service.errors import InvalidStepError
from worker_service.loading.adapter import Adapter
from worker_service.models.causal_model import AdapterPlace, Loadable
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.session.sequence_state import ScheduledChunk


@dataclass(frozen=True)
class AdapterRoom:
    """Limits: slots on the device, largest LoRA rank, adapters in host memory."""

    num_slots: int = 0
    max_rank: int = 1
    max_loaded: int = 0


class Adapters:
    """The adapters of one rank. The device thread calls `add` and `remove` between steps, and `slots` at the start of a
    step."""

    def __init__(self, model: Loadable, room: AdapterRoom, cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Must be called before the model's weights are packed. cuts: the part of each tensor that this rank stores."""
        self.room = room
        self.cuts = cuts
        self.fingerprints: list[str] = []
        """Adapters that a step may use if the step is queued for the device thread now."""
        self._places: Mapping[str, AdapterPlace] = (
            model.allocate_adapters(room.num_slots, room.max_rank) if room.num_slots else {}
        )
        # Load number and adapter by fingerprint. Every load has a new number.
        self._loaded: dict[str, tuple[int, Adapter]] = {}
        # Slot and load number by fingerprint, least recently used first.
        self._slots = OrderedDict[str, tuple[int, int]]()
        self._numbers = itertools.count()
        self._free = list(range(room.num_slots))

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each projection that can have an adapter, before the split over ranks."""
        found = {}
        for name, place in self._places.items():
            cut = self.cuts.get(f"{name}.weight")
            outputs, inputs = (place.num_outputs, place.weights.a.shape[3]) if cut is None else cut.shape
            found[name] = outputs, inputs
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots."""
        weights = {id(place.weights): place.weights for place in self._places.values()}.values()
        return sum(one.a.nbytes + one.b.nbytes for one in weights)

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of an adapter's file: float64 weights of the largest LoRA rank, and 16 MiB for the header."""
        return 8 * self.room.max_rank * sum(map(sum, self.shapes.values())) + (16 << 20)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._places.values())).weights.a.dtype

    def measure_copy(self) -> float:
        """Seconds to copy this rank's part of the largest possible adapter into a slot; 0 without slots."""
        if not self.room.num_slots:
            return 0.0
        rank, device = self.room.max_rank, next(iter(self._places.values())).weights.a.device
        halves = {
            name: (
                torch.zeros(rank, place.weights.a.shape[3], dtype=self.dtype),
                torch.zeros(place.num_outputs, rank, dtype=self.dtype),
            )
            for name, place in self._places.items()
        }
        seconds = 0.0
        for _ in range(2):  # the first copy is not measured: it also allocates memory
            began = time.perf_counter()
            self._fill(0, Adapter(halves))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
        return seconds

    def add(self, fingerprint: str, adapter: Adapter) -> None:
        """adapter: the part that this rank stores."""
        self._loaded[fingerprint] = next(self._numbers), adapter

    def remove(self, fingerprint: str) -> None:
        self._loaded.pop(fingerprint, None)

    def slots(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """The slot of each row's adapter, [rows] int32, negative for no adapter. At least one chunk has an adapter.

        Raises InvalidStepError if an adapter is not in host memory, or if the step has more adapters than slots."""
        names = dict.fromkeys(chunk.sequence.adapter for chunk in chunks if chunk.sequence.adapter)
        if len(names) > self.room.num_slots:
            raise InvalidStepError(f"a step has {len(names)} adapters; this worker has {self.room.num_slots} slots")
        places = {name: self._place(name, names) for name in names}
        of_chunk = [places.get(chunk.sequence.adapter, -1) for chunk in chunks]
        rows = np.repeat(of_chunk, [chunk.stop - chunk.start for chunk in chunks])
        device = next(iter(self._places.values())).weights.ranks.device
        return upload(rows, torch.int32, device)

    def _place(self, name: str, needed: Mapping[str, None]) -> int:
        loaded = self._loaded.get(name)
        if loaded is None:
            raise InvalidStepError(f"the adapter {name[:64]} is not loaded")
        number, adapter = loaded
        held = self._slots.pop(name, None)
        if held is not None and held[1] == number:
            self._slots[name] = held
            return held[0]
        if held is not None:  # the slot contains weights of an earlier load
            self._free.append(held[0])
        if not self._free:
            oldest = next(other for other in self._slots if other not in needed)
            self._free.append(self._slots.pop(oldest)[0])
        slot = self._free.pop()
        self._fill(slot, adapter)
        self._slots[name] = slot, number
        return slot

    def _fill(self, slot: int, adapter: Adapter) -> None:
        # The largest LoRA rank in each fused product, by the Python id of the product's weights.
        ranks: dict[int, int] = {}
        for name, (a, _) in adapter.halves.items():
            weights = self._places[name].weights
            ranks[id(weights)] = max(ranks.get(id(weights), 0), len(a))
        for name, place in self._places.items():
            weights, part = place.weights, place.part
            rank = ranks.get(id(weights), 0)
            weights.ranks[slot] = rank
            if not rank:
                continue
            columns = slice(weights.starts[part], weights.starts[part + 1])
            # Zeroed first: another projection of the fused product may have a larger LoRA rank, and the kernel uses the
            # largest rank.
            weights.a[slot, part, :rank] = 0
            weights.b[slot, :rank, columns] = 0
            if name in adapter.halves:
                a, b = adapter.halves[name]
                weights.a[slot, part, : len(a)] = a.to(weights.a.device)
                weights.b[slot, : len(a), columns] = b.T.to(weights.b.device)
