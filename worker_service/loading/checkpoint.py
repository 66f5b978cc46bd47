"""Opens a model's folder in Hugging Face's layout. A StartError names any faulty file."""

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
from worker_service.loading.quantized.stacked_experts import (
    IN_FLOAT8,
    METHOD,
    MxFloat4Experts,
    StackedFiles,
    stacked_family,
)
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.wording import shown

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Weights(Protocol):
    """A source of weights. Methods raise StartError."""

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents for the model's fingerprint."""

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Check that all tensors exist with these shapes. Allocates no memory."""

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        """Refuse unused tensors that may change the network's result. taken: names of used tensors; ignored: patterns
        of names that this network does not use."""

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        """The tied tensors that nevertheless have separate values in the checkpoint. tied: by tensor name, the tensor
        whose values it shares according to config.json."""

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Fill each tensor in `places`."""


class Checkpoint:
    """An opened model folder. For methods on weights, see `Weights`."""

    def __init__(self, path: Path, weights: Weights | None = None) -> None:
        """weights: None for those in the folder. Raises StartError."""
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation = read_json(path / FILE) if (path / FILE).exists() else None
        """Content of generation_config.json; None without this file."""
        quantization = self.config.pop("quantization_config", None)
        if quantization is None and isinstance(text := self.config.get("text_config"), dict):
            quantization = text.pop("quantization_config", None)  # Kimi K2.5
        self.quantization = quantization
        """quantization_config of config.json or of its text network; None for unquantised weights."""
        self.packed: PackedWeights | MxFloat4Experts | None = None
        """Quantised weights; None if there are none, or if config.json says to dequantise them."""
        if weights is None:
            files = weights = WeightFiles(path)
            in_mx_float4 = isinstance(quantization, dict) and quantization.get("quant_method") == METHOD
            family = stacked_family(self.config)
            if in_mx_float4 or (quantization is None and family is not None):
                weights = StackedFiles(files, quantization, family)
                self.packed = weights.packed
            elif quantization is not None:
                self.packed = _read_packed(files, quantization, path / "config.json", has_stacks=family in IN_FLOAT8)
                weights = PackedFiles(files, self.packed)
        self._weights = weights

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype in config.json, by default float32. If it is not stated for the whole, the text
        network's."""
        inner = self.config.get("text_config")
        both = (self.config, inner if isinstance(inner, dict) else {})
        stated = (config.get(name) for config in both for name in ("dtype", "torch_dtype"))
        name = next(filter(None, stated), "float32")
        if not isinstance(name, str) or name not in _DTYPES:
            raise StartError(
                f"{self.path / 'config.json'}: dtype {shown(name)} is not supported; supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]

    def fingerprint(self, tokenizer_files: Iterable[Path], dtype: torch.dtype, quantization: str) -> str:
        """SHA-256 of config, tokenizer, weights, dtype and quantisation, in hexadecimal. Equal for all ranks and
        devices of a model. Raises StartError."""
        digest = hashlib.sha256(f"{dtype} {quantization}\n".encode())
        for file in sorted({self.path / "config.json", *tokenizer_files}, key=lambda file: file.name):
            _add(digest, file.name, file.read_bytes())
        for name, content in self._weights.identity():
            _add(digest, name, content)
        return digest.hexdigest()

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """See `Weights.check`. cuts: this rank's part of each split tensor, by name. Devices are not compared."""
        self._weights.check(expected, cuts)

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        self._weights.check_none_left(taken, ignored)

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        return self._weights.own(tied)

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """See `Weights.load_into`. Values are converted to the dtype of their place."""
        self._weights.load_into(places, cuts)


def _read_packed(files: WeightFiles, quantization: object, file: Path, *, has_stacks: bool) -> PackedWeights:
    if not isinstance(quantization, dict):
        raise StartError(f"{file}: quantization_config is {shown(quantization)}; it must be an object")
    return PackedWeights(files, quantization, has_stacks=has_stacks)


def _add(digest: "hashlib._Hash", name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)
