"""Random weights for a network of which only the config is given: for measurements and tests; its output means nothing.

They are drawn on the device itself, and those of a name and a shape are the same ones every time. A product's values
stay within a few times the size of its inputs and norms rescale them, so that logits stay finite in 16 bits however
deep the network is.
"""

from collections.abc import Collection, Iterator, Mapping
from zlib import crc32

import torch
from torch import Tensor

from worker_service.parallel.cut import UNCUT, Cut

_SEED = 1
_DEVIATION = 0.02


class DummyWeights:
    """Has a tensor of any name and shape."""

    def __init__(self, device: torch.device) -> None:
        """device: the device that draws the numbers."""
        self._device = device

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Differs from that of real weights, and between kinds of devices and versions of torch: each draws its own."""
        yield f"dummy {_SEED} {_DEVIATION} {self._device.type} {torch.__version__}", b""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Nothing can be missing."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """Nothing can be left."""

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:  # noqa: ARG002 (files have some)
        """Tied tensors stay tied."""
        return frozenset()

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Fill matrices and biases around zero, and the vectors that scale normalised values around one.

        A tensor that is cut is drawn whole, so that its parts belong together.
        """
        for name, place in places.items():
            generator = torch.Generator(place.device).manual_seed(_SEED + crc32(name.encode()))
            is_scale = place.dim() == 1 and not name.endswith("bias")
            cut = cuts.get(name)
            whole = place if cut is None else place.new_empty(cut.shape)
            whole.normal_(1.0 if is_scale else 0.0, _DEVIATION, generator=generator)
            if cut is not None:
                place.copy_(cut.of(whole))
