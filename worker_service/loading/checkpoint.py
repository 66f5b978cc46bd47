"""A model's folder as Hugging Face lays it out: what its config.json says, and where its weights come from.

Everything that can be wrong with a folder ends in a StartError that names the file.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagewire_common.model_files.generation_config import FILE
from pagewire_common.start_error import StartError
from worker_service.loading.files.json_file import read_json
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.quantized.packed_weights import PackedFiles, PackedWeights
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.wording import shown

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Weights(Protocol):
    """Where the values of a model's tensors come from."""

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """A fingerprint of the weights. Raises StartError if reading them fails."""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Raise StartError unless tensors of these names and shapes can be loaded; allocates no memory."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """Raise StartError unless all tensors are among those `taken`, match a pattern of those `ignored`, or cannot
        change what a network computes."""

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        """Of tensors that config.json ties to others, by these: those that are there with values of their own. Raises
        StartError if reading fails."""

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Fill each named place. Raises StartError as `check` does, and where reading fails."""


class Checkpoint:
    """An opened folder; the weights stay where they are until `load_into`."""

    def __init__(self, path: Path, weights: Weights | None = None) -> None:
        """Read config.json and find the weights, unless they are given. Raises StartError."""
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation = read_json(path / FILE) if (path / FILE).exists() else None
        """What generation_config.json says, if there is one."""
        self.quantization = quantization = self.config.pop("quantization_config", None)
        """What config.json says of weights that are stored quantised."""
        self.packed: PackedWeights | None = None
        """The weights that are stored quantised, if any are."""
        if weights is None:
            files = weights = WeightFiles(path)
            if quantization is not None:
                self.packed = _read_packed(files, quantization, path / "config.json")
                weights = PackedFiles(files, self.packed)
        self._weights = weights

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype by config.json; float32 if it says nothing."""
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in _DTYPES:
            raise StartError(
                f"{self.path / 'config.json'}: dtype {shown(name)} is not supported; supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]

    def fingerprint(self, tokenizer_files: Iterable[Path], dtype: torch.dtype, quantization: str) -> str:
        """SHA-256, in hexadecimal, over config, tokenizer, all of the weights, and what is made of them.

        It depends neither on the part of the weights that is held here nor on the device. Raises StartError.
        """
        digest = hashlib.sha256(f"{dtype} {quantization}\n".encode())
        for file in sorted({self.path / "config.json", *tokenizer_files}, key=lambda file: file.name):
            _add(digest, file.name, file.read_bytes())
        for name, content in self._weights.identity():
            _add(digest, name, content)
        return digest.hexdigest()

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Raise StartError unless the weights have tensors of these names and shapes, whatever device these are on.

        cuts: the wanted part of each tensor that is not wanted whole, by name.
        """
        self._weights.check(expected, cuts)

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """As `Weights` has it."""
        self._weights.check_none_left(taken, ignored)

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        """As `Weights` has it."""
        return self._weights.own(tied)

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Copy each named tensor, or the part that `cuts` gives for it, to its place, in the place's type. Raises
        StartError."""
        self._weights.load_into(places, cuts)


def _read_packed(files: WeightFiles, quantization: object, file: Path) -> PackedWeights:
    if not isinstance(quantization, dict):
        raise StartError(f"{file}: quantization_config is {shown(quantization)}; it must be an object")
    return PackedWeights(files, quantization)


def _add(digest: "hashlib._Hash", name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)
