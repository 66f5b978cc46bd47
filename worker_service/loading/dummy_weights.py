"""Random weights for measurements and tests; outputs are meaningless. Name and shape determine a tensor's values.
Logits stay finite in float16 and bfloat16 for any number of layers."""

from collections.abc import Collection, Iterator, Mapping
from zlib import crc32

import torch
from torch import Tensor

from worker_service.parallel.cut import UNCUT, Cut

_SEED = 1
_DEVIATION = 0.02


class DummyWeights:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """See `Weights.identity`. The random numbers depend on the type of device and on torch's version."""
        yield f"dummy {_SEED} {_DEVIATION} {self._device.type} {torch.__version__}", b""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """No random tensor can be missing."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """No random tensor can be unused."""

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:  # noqa: ARG002 (`WeightFiles` uses it)
        """No tied tensor has separate values."""
        return frozenset()

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Draw norm weights around 1, and other values around 0. Every rank draws a split tensor whole and keeps its
        own part, so that the parts fit together."""
        for name, place in places.items():
            generator = torch.Generator(place.device).manual_seed(_SEED + crc32(name.encode()))
            is_scale = place.dim() == 1 and not name.endswith("bias")
            cut = cuts.get(name)
            whole = place if cut is None else place.new_empty(cut.shape)
            whole.normal_(1.0 if is_scale else 0.0, _DEVIATION, generator=generator)
            if cut is not None:
                place.copy_(cut.of(whole))
