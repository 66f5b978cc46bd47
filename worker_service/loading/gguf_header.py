"""The header of a GGUF file, believed only where it agrees with the file.

After magic, version and two counts come key-value pairs, then each tensor's name, sizes, type and offset, then the
data. The library that reads the data checks none of this, so every length, count and offset is first checked here
against the size of the file, and how many layers and experts there are against the tensors. Texts and arrays are
skipped; the library interprets them.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pagewire_common.start_error import StartError
from worker_service.errors import UnsoundFileError
from worker_service.loading.bounded_reader import BoundedReader
from worker_service.wording import named, shown

VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Types of values by their numbers, in `struct`'s notation."""
_FRACTIONS = (6, 12)
_STRING, _ARRAY = 8, 9
_SMALLEST_PAIR = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_BLOCK = re.compile(r"blk\.(\d+)\.")
_POSITIVE = (".block_count", ".embedding_length", ".attention.head_count")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor on disk: its bytes go from `begin` up to `end`, counted from the start of the file.

    `shape` has the fastest dimension first, as the file has it.
    """

    type_name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_gguf_header(file: Path) -> dict[str, GgufTensor]:
    """The tensors by name. Raises StartError, which names the file and the key or tensor that is wrong."""
    try:
        with open(file, "rb") as stream:
            return _read_header(BoundedReader(stream))
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    except UnsoundFileError as error:
        raise StartError(f"{file} is not a sound GGUF file: {error}") from error


def _read_header(reader: BoundedReader) -> dict[str, GgufTensor]:
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
    if alignment is None or alignment < 1 or alignment & (alignment - 1):
        raise UnsoundFileError(f"general.alignment is {alignment}; it must be a power of two")
    if (metadata.get("split.count") or 1) > 1:
        raise UnsoundFileError(f"it is one of {metadata['split.count']} parts; they must be merged into one file")
    infos = _read_tensor_infos(reader, num_tensors)
    data_begin = -(-reader.position // alignment) * alignment
    tensors = {name: _place(name, info, alignment, data_begin, reader.file_bytes) for name, info in infos.items()}
    _check_overlaps(tensors)
    _check_counts(metadata, tensors)
    return tensors


def _read_metadata(reader: BoundedReader, num_pairs: int) -> dict[str, int | None]:
    """Whole numbers by their keys; None for values of other types."""
    metadata: dict[str, int | None] = {}
    for number in range(num_pairs):
        key = reader.name(f"key {number}")
        if key in metadata:
            raise UnsoundFileError(f"it has the key {named(key)} twice")
        what = f"the value of {named(key)}"
        value_type = reader.number("I", what)
        if value_type in _SCALARS and value_type not in _FRACTIONS:
            metadata[key] = reader.number(_SCALARS[value_type], what)
        else:
            metadata[key] = None
            _skip_values(reader, value_type, 1, what)
    return metadata


def _skip_values(reader: BoundedReader, value_type: int, count: int, what: str, depth: int = 0) -> None:
    if value_type in _SCALARS:
        reader.skip(count * struct.calcsize("<" + _SCALARS[value_type]), what)
    elif value_type == _STRING:
        for _ in range(count):
            reader.skip(reader.number("Q", what), what)
    elif value_type != _ARRAY:
        raise UnsoundFileError(f"{what} is of the unknown type {value_type}")
    elif depth == _MAX_NESTING:
        raise UnsoundFileError(f"{what} nests arrays more than {_MAX_NESTING} deep")
    else:
        for _ in range(count):
            inner = reader.number("I", what)
            _skip_values(reader, inner, reader.count("Q", _smallest(inner), what), what, depth + 1)


def _smallest(value_type: int) -> int:
    """Bytes that a value of this type takes at least."""
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
                f"tensor {named(name)} has {num_dimensions} dimensions; at most {_MAX_DIMENSIONS} can be"
            )
        shape = tuple(reader.number("Q", what) for _ in range(num_dimensions))
        infos[name] = _TensorInfo(shape, reader.number("I", what), reader.number("Q", what))
    return infos


def _place(name: str, info: _TensorInfo, alignment: int, data_begin: int, file_bytes: int) -> GgufTensor:
    if info.type_number not in _tensor_types():
        raise UnsoundFileError(f"tensor {named(name)} is of the unknown type {info.type_number}")
    kind = _tensor_types()[info.type_number]
    row = info.shape[0] if info.shape else 1
    if row % kind.block_size:
        raise UnsoundFileError(f"tensor {named(name)} has rows of {row}, which {kind.name} packs by {kind.block_size}")
    if info.offset % alignment:
        raise UnsoundFileError(f"tensor {named(name)} is at {info.offset}, which is no multiple of {alignment}")
    begin = data_begin + info.offset
    end = begin + math.prod(info.shape) // kind.block_size * kind.block_bytes  # of four sizes at most: no large number
    if end > file_bytes:
        raise UnsoundFileError(
            f"tensor {named(name)}, {kind.name} {shown(list(info.shape))}, ends at byte {end}, "
            f"and the file has {file_bytes}; it may be incomplete"
        )
    return GgufTensor(kind.name, info.shape, begin, end)


def _check_overlaps(tensors: Mapping[str, GgufTensor]) -> None:
    reached, last = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < reached:
            raise UnsoundFileError(f"tensor {named(name)} overlaps tensor {named(last)}")
        reached, last = tensor.end, name


def _check_counts(metadata: Mapping[str, int | None], tensors: Mapping[str, GgufTensor]) -> None:
    """The library would make all layers and experts that are said to be, and leave out those that are not."""
    num_blocks = len({block[1] for name in tensors if (block := _BLOCK.match(name))})
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for key, value in metadata.items():
        if value is None:
            continue
        if key.endswith(_POSITIVE) and value < 1:
            raise UnsoundFileError(f"{named(key)} is {value}")
        if key.endswith(".block_count") and value != num_blocks:
            raise UnsoundFileError(f"{named(key)} is {value}, and there are tensors of {num_blocks} blocks")
        if key.endswith(".expert_count") and value > largest:
            raise UnsoundFileError(f"{named(key)} is {value}, and no tensor has so many parts")


class _TensorType(NamedTuple):
    """`block_size` elements take `block_bytes` bytes together."""

    name: str
    block_size: int
    block_bytes: int


@cache
def _tensor_types() -> dict[int, _TensorType]:
    """Types of tensors by number. The table is the library's, because it could not convert any other type."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(number): _TensorType(number.name, *sizes) for number, sizes in GGML_QUANT_SIZES.items()}
