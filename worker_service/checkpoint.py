"""Reads a Hugging Face directory: its config.json, and its weights straight from the file into their final places.

Only safetensors are read. Everything that can be wrong with a directory ends in a StartError that names the file.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire_common.errors import StartError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_HEADER_BYTES = 100 << 20


class Checkpoint:
    """An opened directory; the weights stay on disk until `load_into`."""

    def __init__(self, path: Path) -> None:
        """Read config.json and find the weight files. Raises StartError."""
        self.path = path
        self.config = _read_json(path / "config.json")
        if "quantization_config" in self.config:
            raise StartError(f"{path / 'config.json'}: quantised weights are not supported")
        index = path / "model.safetensors.index.json"
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise StartError(f"{index}: there is no weight_map from tensors to files")
            # Only the last part of a name counts, so that an index cannot point out of its folder.
            names = sorted({Path(name).name for name in weight_map.values()})
        else:
            names = ["model.safetensors"]
        self.weight_files = [path / name for name in names]
        for file in self.weight_files:
            if not file.is_file():
                raise StartError(f"{file} does not exist; the weights must be safetensors")
            if not os.access(file, os.R_OK):
                raise StartError(f"{file} may not be read by this user")

    @property
    def model_type(self) -> str:
        """The family of the network, as config.json calls it."""
        return str(self.config.get("model_type", "of no stated type"))

    @property
    def dtype(self) -> torch.dtype:
        """What config.json says the weights are; float32 where it says nothing."""
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if name not in _DTYPES:
            raise StartError(
                f"{self.path / 'config.json'}: dtype {name} is not supported; supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]

    def fingerprint(self, tokenizer_files: Iterable[Path]) -> str:
        """SHA-256, in hexadecimal, over config, tokenizer and the weight files' headers and sizes.

        Headers hold names, shapes and types; weights of equal shapes are not told apart.
        """
        digest = hashlib.sha256()
        for file in sorted({self.path / "config.json", *tokenizer_files}, key=lambda file: file.name):
            _add(digest, file.name, file.read_bytes())
        for file in self.weight_files:
            _add(digest, f"{file.name} {file.stat().st_size}", _safetensors_header(file))
        return digest.hexdigest()

    def load_into(self, places: Mapping[str, Tensor]) -> None:
        """Copy each named tensor to its place, converting its type; other tensors are ignored.

        Raises StartError where one is missing, misshapen or not of floating point.
        """
        with ExitStack() as stack:
            where = {}
            for file in self.weight_files:
                try:
                    opened = stack.enter_context(safe_open(file, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise StartError(f"{file} is not a sound safetensors file: {error}") from error
                where.update(dict.fromkeys(opened.keys(), (file, opened)))
            for name, place in places.items():
                if name not in where:
                    raise StartError(f"{self.path}: the weights lack the tensor {name}")
                file, opened = where[name]
                tensor = opened.get_tensor(name)
                if tensor.shape != place.shape or not tensor.is_floating_point():
                    raise StartError(
                        f"{file}: tensor {name} is {list(tensor.shape)} of {tensor.dtype} "
                        f"where config.json asks for {list(place.shape)} of floating point"
                    )
                place.copy_(tensor)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartError(f"{file} does not hold a JSON object")
    return content


def _safetensors_header(file: Path) -> bytes:
    """The header: 8 bytes of length, little endian, then JSON."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise StartError(f"{file} is not a sound safetensors file: its header claims {length} bytes")
        return stream.read(length)


def _add(digest: "hashlib._Hash", name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)
