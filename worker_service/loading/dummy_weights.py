"""Random weights for a network without a checkpoint, for measurements and tests. The output of a network with random
weights is meaningless.

The device that computes the network also draws the random weights. A tensor's name and shape determine its values, so
the values are the same in every run. The outputs of a product by such weights are at most a few times larger than the
inputs, and norms rescale the outputs. Logits thus stay finite in float16 and bfloat16 for any number of layers.
"""

from collections.abc import Collection, Iterator, Mapping
from zlib import crc32

import torch
from torch import Tensor

from worker_service.parallel.cut import UNCUT, Cut

_SEED = 1
_DEVIATION = 0.02


class DummyWeights:
    """A source of weights that has a random tensor for any name and shape."""

    def __init__(self, device: torch.device) -> None:
        """device: the device that draws the random numbers."""
        self._device = device

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Implements `Weights.identity`. The identity contains the type of device and the version of torch, because the
        random numbers depend on both."""
        yield f"dummy {_SEED} {_DEVIATION} {self._device.type} {torch.__version__}", b""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Implements `Weights.check`. Nothing is checked, because no random tensor can be missing."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """Implements `Weights.check_none_left`. Nothing is checked, because no random tensor can be unused."""

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:  # noqa: ARG002 (`WeightFiles` uses it)
        """Implements `Weights.own`. No tied tensor has separate values."""
        return frozenset()

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Fill matrices and biases with random values around zero, and norm weights with random values around one.

        Every rank draws the whole of a tensor that is split over ranks, and keeps its own part, so the ranks' parts fit
        together.
        """
        for name, place in places.items():
            generator = torch.Generator(place.device).manual_seed(_SEED + crc32(name.encode()))
            is_scale = place.dim() == 1 and not name.endswith("bias")
            cut = cuts.get(name)
            whole = place if cut is None else place.new_empty(cut.shape)
            whole.normal_(1.0 if is_scale else 0.0, _DEVIATION, generator=generator)
            if cut is not None:
                place.copy_(cut.of(whole))
