"""Random weights for a network without a checkpoint, for measurements and tests. The network's output is meaningless.

The device itself draws the values. A tensor's name and shape determine its values, so values are the same in every run.
The outputs of a product are at most a few times larger than its inputs, and norms rescale the outputs. Logits thus stay
finite in 16 bits at any depth of the network.
"""

from collections.abc import Collection, Iterator, Mapping
from zlib import crc32

import torch
from torch import Tensor

from worker_service.parallel.cut import UNCUT, Cut

_SEED = 1
_DEVIATION = 0.02


class DummyWeights:
    """A source of weights that has a tensor of any name and shape."""

    def __init__(self, device: torch.device) -> None:
        """device: the device that draws the numbers."""
        self._device = device

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Implements `Weights.identity`. The identity contains the type of device and the version of torch, because the
        drawn numbers depend on both."""
        yield f"dummy {_SEED} {_DEVIATION} {self._device.type} {torch.__version__}", b""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Implements `Weights.check` without a check, because no tensor can be missing."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """Implements `Weights.check_none_left` without a check, because no tensor can be unused."""

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:  # noqa: ARG002 (weights in files use it)
        """Implements `Weights.own`: tied tensors stay tied."""
        return frozenset()

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Fill matrices and biases with values around zero, and norm weights with values around one.

        Every rank draws the whole of a split tensor and keeps its part, so the ranks' parts fit together.
        """
        for name, place in places.items():
            generator = torch.Generator(place.device).manual_seed(_SEED + crc32(name.encode()))
            is_scale = place.dim() == 1 and not name.endswith("bias")
            cut = cuts.get(name)
            whole = place if cut is None else place.new_empty(cut.shape)
            whole.normal_(1.0 if is_scale else 0.0, _DEVIATION, generator=generator)
            if cut is not None:
                place.copy_(cut.of(whole))
