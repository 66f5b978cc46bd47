"""Reads experts in MXFP4 (OCP Microscaling Formats, 2023), as gpt-oss stores them, and widens them.

A weight NAME, [experts, inputs, outputs], is stored as two uint8 tensors. NAME_blocks, [experts, outputs, inputs / 32,
16], has two e2m1 numbers a byte, the first in the lower bits. NAME_scales, [experts, outputs, inputs / 32], has the
exponent of two of each group's scale, plus 127.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.quantized.quantization_keys import FLAG, TEXTS, check_keys
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.wording import named

METHOD = "mxfp4"
"""The `quant_method` of config.json."""
GROUP = 32
"""Inputs that share a scale."""
_KEYS = {"modules_to_not_convert": TEXTS, "dequantize": FLAG}
"""Keys of the quantization_config. The names of the tensors show which weights are stored so."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NOT_A_NUMBER = 255


class MxFloat4Files:
    """Weights of a checkpoint, some in MXFP4, for networks with floating-point weights. See `Weights`."""

    def __init__(self, files: WeightFiles, config: Mapping[str, Any]) -> None:
        """config: the quantization_config. Raises StartError for an unknown key."""
        self._files = files
        try:
            check_keys("", config, _KEYS)
        except ValueError as error:
            raise StartError(f"config.json: quantization_config: {error}") from error

    def identity(self) -> Iterator[tuple[str, bytes]]:
        return self._files.identity()

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        for name, place in expected.items():
            if self._is_stored(name):
                self._check_parts(name, place)
        self._files.check({name: place for name, place in expected.items() if not self._is_stored(name)}, cuts)

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        parts = [part for name in taken if self._is_stored(name) for part in (f"{name}_blocks", f"{name}_scales")]
        self._files.check_none_left({*taken, *parts}, ignored)

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        return self._files.own(tied)

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        self.check(places, cuts)
        self._files.load_into({name: place for name, place in places.items() if not self._is_stored(name)}, cuts)
        for name, place in places.items():
            if self._is_stored(name):
                blocks, scales = self._files.read(f"{name}_blocks"), self._files.read(f"{name}_scales")
                if (scales == _NOT_A_NUMBER).any():
                    raise StartError(f"a scale in {named(f'{name}_scales')} is not a number")
                # One expert at a time, because an expert in float32 takes eight times its stored memory.
                for expert, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
                    place[expert].copy_(widened(block, scale).T)

    def _is_stored(self, name: str) -> bool:
        return self._files.dtypes.get(f"{name}_blocks") == "U8"

    def _check_parts(self, name: str, place: Tensor) -> None:
        if place.dim() != 3 or place.shape[1] % GROUP:
            raise StartError(f"{named(name)} of {list(place.shape)} cannot be stored in groups of {GROUP} inputs")
        experts, inputs, outputs = place.shape
        groups = [experts, outputs, inputs // GROUP]
        for part, shape in (("blocks", [*groups, GROUP // 2]), ("scales", groups)):
            stored = f"{name}_{part}"
            if self._files.dtypes.get(stored) != "U8":
                raise StartError(f"the weights lack the tensor {named(stored)} of U8")
            if list(self._files.shape(stored)) != shape:
                found = list(self._files.shape(stored))
                raise StartError(f"tensor {named(stored)} is {found} where config.json asks for {shape}")


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: [outputs, groups, 16] uint8; scales: [outputs, groups] uint8. Returns [outputs, inputs] float32."""
    values = torch.tensor((*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)))
    numbers = values[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(2)
    return torch.ldexp(numbers, scales[..., None].int() - 127).flatten(1)
