"""Writes a safetensors file in pieces, so that no tensor is in memory as a whole."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_ITEM_BYTES = {"BF16": 2, "U8": 1}


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to write. `pieces` is consumed once, in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[bytes | memoryview]


def write_safetensors(file: Path, tensors: Mapping[str, WrittenTensor], metadata: Mapping[str, str]) -> None:
    """Raises ValueError if a tensor's pieces do not match its type and shape."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with open(file, "wb") as stream:
        stream.write(len(content).to_bytes(8, "little") + content)
        for name, tensor in tensors.items():
            expected = math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
            written = sum(stream.write(piece) for piece in tensor.pieces)
            if written != expected:
                raise ValueError(f"tensor {name} has {written} bytes in place of {expected}")
