"""Opens a model's folder in Hugging Face's layout: reads config.json, and finds the source of the weights.

If a file in the folder is faulty, a StartError is raised that names the file.
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
    """The interface of a source of weights, such as the files of a checkpoint or random numbers."""

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents that identify the weights, and that the model's fingerprint hashes. Raises
        StartError if reading fails."""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Raise StartError if a tensor of `expected` is missing or has another shape. Allocates no memory."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """Raise StartError if there is an unused tensor that may change the result of the network.

        taken: names of used tensors; ignored: patterns of names that this network does not use.
        """

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        """Returns the names of the tied tensors for which the checkpoint nevertheless has separate values. Raises
        StartError if reading fails.

        tied: the name of each tensor that config.json declares as tied, with the name of the tensor whose values it
        shares.
        """

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Fill each tensor in `places`. Raises StartError if a tensor is missing or has another shape, or if reading
        fails."""


class Checkpoint:
    """An opened model folder. `load_into` reads the weights."""

    def __init__(self, path: Path, weights: Weights | None = None) -> None:
        """Read config.json. If `weights` is None, the weights are those in the folder's files. Raises StartError."""
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation = read_json(path / FILE) if (path / FILE).exists() else None
        """Content of generation_config.json; None if the folder has no such file."""
        self.quantization = quantization = self.config.pop("quantization_config", None)
        """The quantization_config of config.json; None for unquantised weights."""
        self.packed: PackedWeights | None = None
        """The weights that are stored quantised; None if all weights are unquantised."""
        if weights is None:
            files = weights = WeightFiles(path)
            if quantization is not None:
                self.packed = _read_packed(files, quantization, path / "config.json")
                weights = PackedFiles(files, self.packed)
        self._weights = weights

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype in config.json; float32 if config.json has no dtype."""
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in _DTYPES:
            raise StartError(
                f"{self.path / 'config.json'}: dtype {shown(name)} is not supported; supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]

    def fingerprint(self, tokenizer_files: Iterable[Path], dtype: torch.dtype, quantization: str) -> str:
        """The model's fingerprint: the SHA-256 of config, tokenizer, all weights, dtype and quantisation, in
        hexadecimal.

        All ranks and all devices of the same model compute the same fingerprint. Raises StartError.
        """
        digest = hashlib.sha256(f"{dtype} {quantization}\n".encode())
        for file in sorted({self.path / "config.json", *tokenizer_files}, key=lambda file: file.name):
            _add(digest, file.name, file.read_bytes())
        for name, content in self._weights.identity():
            _add(digest, name, content)
        return digest.hexdigest()

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Raise StartError if a tensor of `expected` is missing or has another shape. The tensors' devices are not
        compared.

        cuts: this rank's part of each tensor that is split over ranks, by the tensor's name.
        """
        self._weights.check(expected, cuts)

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """See `Weights.check_none_left`."""
        self._weights.check_none_left(taken, ignored)

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        """See `Weights.own`."""
        return self._weights.own(tied)

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Copy each tensor named in `places`, or this rank's part of the tensor, to its place in memory. Values are
        converted to the dtype of the place. Raises StartError."""
        self._weights.load_into(places, cuts)


def _read_packed(files: WeightFiles, quantization: object, file: Path) -> PackedWeights:
    if not isinstance(quantization, dict):
        raise StartError(f"{file}: quantization_config is {shown(quantization)}; it must be an object")
    return PackedWeights(files, quantization)


def _add(digest: "hashlib._Hash", name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)
