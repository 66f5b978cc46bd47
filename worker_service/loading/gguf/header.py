"""Reads the header of a GGUF file, and checks every length, count and offset against the file's size. The file: magic
number, version, counts, keys with values, tensors' names, shapes, types and offsets, then data."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagewire_common.start_error import StartError
from worker_service.errors import UnsoundFileError
from worker_service.loading.files.bounded_reader import BoundedReader
from worker_service.wording import named, shown

VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct`, by GGUF's number of the type."""
_BOOLEAN, _STRING, _ARRAY = 7, 8, 9
_SMALLEST_PAIR = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4
_MAX_TEXTS = 1 << 22
"""Texts of an array: four times the merges of the largest vocabulary."""
_MAX_VALUE_BYTES = 1 << 26
"""Bytes of a text or of an array of numbers. The largest templates and vocabularies have less than 10 MB."""
_MAX_METADATA_BYTES = 1 << 30
_DEFAULT_ALIGNMENT = 32

Value: TypeAlias = "bool | int | float | str | list[str] | npt.NDArray[Any] | None"
"""Value of a key. None replaces arrays of arrays, which no known key uses."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Bytes [begin, end) of a file. The first dimension of `shape` is contiguous, as in GGUF."""

    file: Path
    type_name: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of all elements along the first dimension."""
        return (self.end - self.begin) // max(1, math.prod(self.shape[1:]))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(file: Path) -> GgufHeader:
    """A StartError names the file and the faulty key or tensor."""
    try:
        with open(file, "rb") as stream:
            return _read_header(BoundedReader(stream), file)
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    except UnsoundFileError as error:
        raise StartError(f"{file} is not a sound GGUF file: {error}") from error


def _read_header(reader: BoundedReader, file: Path) -> GgufHeader:
    if reader.take(4, "the magic number") != b"GGUF":
        raise UnsoundFileError("it does not begin with GGUF")
    version = reader.number("I", "the version")
    if version not in VERSIONS:
        raise UnsoundFileError(
            f"its version is {version}; supported are {' and '.join(map(str, VERSIONS))}, little endian"
        )
    num_tensors = reader.count("Q", _SMALLEST_TENSOR, "the list of tensors")
    num_pairs = reader.count("Q", _SMALLEST_PAIR, "the list of keys")
    metadata = _read_metadata(reader, num_pairs)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise UnsoundFileError(f"general.alignment is {shown(alignment)}; it must be a power of two")
    infos = _read_tensor_infos(reader, num_tensors)
    data_begin = -(-reader.position // alignment) * alignment
    tensors = {name: _place(file, name, info, alignment, data_begin, reader.file_bytes) for name, info in infos.items()}
    _check_overlaps(tensors)
    return GgufHeader(metadata, tensors)


def _read_metadata(reader: BoundedReader, num_pairs: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for number in range(num_pairs):
        key = reader.name(f"key {number}")
        if key in metadata:
            raise UnsoundFileError(f"it has the key {named(key)} twice")
        what = f"the value of {named(key)}"
        metadata[key] = _read_value(reader, reader.number("I", what), what)
        if reader.position > _MAX_METADATA_BYTES:
            raise UnsoundFileError(f"its keys and values have more than {_MAX_METADATA_BYTES} bytes")
    return metadata


def _read_value(reader: BoundedReader, value_type: int, what: str) -> Value:
    if value_type in _SCALARS:
        kind = "<" + _SCALARS[value_type]
        (value,) = struct.unpack(kind, reader.take(struct.calcsize(kind), what))
        return bool(value) if value_type == _BOOLEAN else value
    if value_type == _STRING:
        return reader.text(_MAX_VALUE_BYTES, what)
    if value_type != _ARRAY:
        raise UnsoundFileError(f"{what} is of the unknown type {value_type}")
    return _read_array(reader, what)


def _read_array(reader: BoundedReader, what: str, depth: int = 0) -> Value:
    if depth == _MAX_NESTING:
        raise UnsoundFileError(f"{what} nests arrays more than {_MAX_NESTING} deep")
    inner = reader.number("I", what)
    count = reader.count("Q", _smallest(inner), what)
    if inner in _SCALARS:
        num_bytes = count * _smallest(inner)
        if num_bytes > _MAX_VALUE_BYTES:
            raise UnsoundFileError(f"{what} has {num_bytes} bytes; at most {_MAX_VALUE_BYTES} are read")
        values = np.frombuffer(reader.take(num_bytes, what), "<" + _SCALARS[inner])
        return values != 0 if inner == _BOOLEAN else values
    if inner == _STRING:
        if count > _MAX_TEXTS:
            raise UnsoundFileError(f"{what} has {count} texts; at most {_MAX_TEXTS} are read")
        return [reader.text(_MAX_VALUE_BYTES, what) for _ in range(count)]
    if inner != _ARRAY:
        raise UnsoundFileError(f"{what} is of the unknown type {inner}")
    for _ in range(count):
        _read_array(reader, what, depth + 1)
    return None


def _smallest(value_type: int) -> int:
    """Minimum number of bytes of a value of this type."""
    return struct.calcsize("<" + _SCALARS[value_type]) if value_type in _SCALARS else 8


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    type_number: int
    offset: int


def _read_tensor_infos(reader: BoundedReader, num_tensors: int) -> dict[str, _TensorInfo]:
    infos: dict[str, _TensorInfo] = {}
    for number in range(num_tensors):
        name = reader.name(f"tensor {number}")
        what = f"the description of tensor {named(name)}"
        if name in infos:
            raise UnsoundFileError(f"it has the tensor {named(name)} twice")
        num_dimensions = reader.number("I", what)
        if num_dimensions > _MAX_DIMENSIONS:
            raise UnsoundFileError(
                f"tensor {named(name)} has {num_dimensions} dimensions; at most {_MAX_DIMENSIONS} are supported"
            )
        shape = tuple(reader.number("Q", what) for _ in range(num_dimensions))
        infos[name] = _TensorInfo(shape, reader.number("I", what), reader.number("Q", what))
    return infos


def _place(file: Path, name: str, info: _TensorInfo, alignment: int, data_begin: int, file_bytes: int) -> GgufTensor:
    if info.type_number not in _tensor_types():
        raise UnsoundFileError(f"tensor {named(name)} is of the unknown type {info.type_number}")
    kind = _tensor_types()[info.type_number]
    row = info.shape[0] if info.shape else 1
    if row % kind.block_size:
        raise UnsoundFileError(f"tensor {named(name)} has rows of {row}, which {kind.name} packs by {kind.block_size}")
    if info.offset % alignment:
        raise UnsoundFileError(f"tensor {named(name)} is at {info.offset}, which is no multiple of {alignment}")
    begin = data_begin + info.offset
    # At most four dimensions, so the product stays small.
    end = begin + math.prod(info.shape) // kind.block_size * kind.block_bytes
    if end > file_bytes:
        raise UnsoundFileError(
            f"tensor {named(name)}, {kind.name} {shown(list(info.shape))}, ends at byte {end}, "
            f"and the file has {file_bytes}; it may be incomplete"
        )
    return GgufTensor(file, kind.name, info.shape, begin, end)


def _check_overlaps(tensors: Mapping[str, GgufTensor]) -> None:
    reached, last = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < reached:
            raise UnsoundFileError(f"tensor {named(name)} overlaps tensor {named(last)}")
        reached, last = tensor.end, name


class _TensorType(NamedTuple):
    """A tensor type with blocks of `block_size` elements in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


@cache
def _tensor_types() -> dict[int, _TensorType]:
    """Tensor types by GGUF's number, from the Python package gguf, which also dequantises."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(number): _TensorType(number.name, *sizes) for number, sizes in GGML_QUANT_SIZES.items()}
