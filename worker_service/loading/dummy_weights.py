"""Random weights for a network without a checkpoint, for measurements and tests; the output is meaningless.

The device itself draws the values. Name and shape determine them, so they are the same in every run. A product's values
stay within a few times the size of its inputs, and norms rescale them. Logits thus stay finite in 16 bits at any depth
of the network.
"""

from collections.abc import Collection, Iterator, Mapping
from zlib import crc32

import torch
from torch import Tensor

from worker_service.parallel.cut import UNCUT, Cut

_SEED = 1
_DEVIATION = 0.02


class DummyWeights:
    """Provides a tensor of any name and shape."""

    def __init__(self, device: torch.device) -> None:
        """device: the device that draws the numbers."""
        self._device = device

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Differs from the identity of real weights. Types of devices and versions of torch draw other numbers, so they
        differ, too."""
        yield f"dummy {_SEED} {_DEVIATION} {self._device.type} {torch.__version__}", b""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Implements `Weights.check`: no tensor can be missing."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """Implements `Weights.check_none_left`: no tensor can be unused."""

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:  # noqa: ARG002 (files have some)
        """Implements `Weights.own`: tied tensors stay tied."""
        return frozenset()

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Fill matrices and biases with values around zero, and norm weights with values around one.

        A tensor that is cut is drawn whole, so the ranks' parts fit together.
        """
        for name, place in places.items():
            generator = torch.Generator(place.device).manual_seed(_SEED + crc32(name.encode()))
            is_scale = place.dim() == 1 and not name.endswith("bias")
            cut = cuts.get(name)
            whole = place if cut is None else place.new_empty(cut.shape)
            whole.normal_(1.0 if is_scale else 0.0, _DEVIATION, generator=generator)
            if cut is not None:
                place.copy_(cut.of(whole))
