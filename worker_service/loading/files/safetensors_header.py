"""Reads the header of a safetensors file, and checks every value against the file's size. The file: 8 bytes for the
length of the JSON header, the header, then the tensors' data without gaps."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagewire_common.start_error import StartError
from worker_service.errors import UnsoundFileError
from worker_service.wording import named, shown

MAX_HEADER_BYTES = 100_000_000
"""Bytes of a header, the limit of the safetensors specification."""

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of an element, for every type of safetensors."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Bytes [begin, end) of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def row_bytes(self) -> int:
        """Bytes of all elements with the same first index."""
        return self.num_bytes // (self.shape[0] or 1) if self.shape else self.num_bytes


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    content: bytes
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(file: Path) -> SafetensorsHeader:
    """Raises a StartError that names the file and the faulty tensor."""
    try:
        with open(file, "rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            content = _read_content(stream, file_bytes)
        return SafetensorsHeader(content, *_parse(content, file, file_bytes))
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    except UnsoundFileError as error:
        raise StartError(f"{file} is not a sound safetensors file: {error}") from error


def _read_content(stream: BinaryIO, file_bytes: int) -> bytes:
    if file_bytes < 8:
        raise UnsoundFileError(f"it has {file_bytes} bytes; the length of a header takes 8")
    length = int.from_bytes(stream.read(8), "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise UnsoundFileError(
            f"its header claims {length} bytes, where the file has {file_bytes - 8} behind the length "
            f"and the format allows {MAX_HEADER_BYTES}"
        )
    content = stream.read(length)
    if len(content) < length:
        raise UnsoundFileError("it became shorter while it was read")
    return content


def _parse(content: bytes, file: Path, file_bytes: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    try:
        header = json.loads(content.decode(), object_pairs_hook=_without_duplicates)
    except UnsoundFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnsoundFileError(f"its header is not JSON in UTF-8: {error}") from error
    if not isinstance(header, dict):
        raise UnsoundFileError("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UnsoundFileError("__metadata__ does not map names to texts")
    data_begin = 8 + len(content)
    tensors = {name: _parse_tensor(name, entry, file, data_begin, file_bytes) for name, entry in header.items()}
    _check_ranges(tensors, data_begin, file_bytes)
    return tensors, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise UnsoundFileError(f"its header has {named(key)} twice")
        entries[key] = value
    return entries


def _parse_tensor(name: str, entry: Any, file: Path, data_begin: int, file_bytes: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise UnsoundFileError(f"its header describes tensor {named(name)} by {shown(entry)}")
    entry = {"dtype": None, "shape": None, "data_offsets": None} | entry
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise UnsoundFileError(f"tensor {named(name)} is of the unknown type {shown(dtype)}")
    if not _is_counts(shape):
        raise UnsoundFileError(f"tensor {named(name)} has the shape {shown(shape)}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UnsoundFileError(f"tensor {named(name)} has the data_offsets {shown(offsets)}")
    begin, end = (data_begin + offset for offset in offsets)
    if end > file_bytes:
        raise UnsoundFileError(
            f"tensor {named(name)} ends at byte {shown(end)}, and the file has {file_bytes}; it may be incomplete"
        )
    if _count_elements(shape, 8 * file_bytes) * _BITS[dtype] != 8 * (end - begin):
        raise UnsoundFileError(f"tensor {named(name)} has {end - begin} bytes, not those of {dtype} {shown(shape)}")
    return StoredTensor(file, dtype, tuple(shape), begin, end)


def _is_counts(value: Any) -> bool:
    """Whether a JSON value is a list of non-negative whole numbers; true does not count."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _count_elements(shape: list[int], limit: int) -> int:
    """The number of elements, or any number above `limit`: the exact product of many sizes could take too long."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > limit:
            break
    return count


def _check_ranges(tensors: Mapping[str, StoredTensor], data_begin: int, file_bytes: int) -> None:
    """Refuse gaps and overlaps, signs of a damaged or malicious file."""
    reached, last = data_begin, "its header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < reached:
            raise UnsoundFileError(f"tensor {named(name)} overlaps {last}")
        if tensor.begin > reached:
            raise UnsoundFileError(
                f"{tensor.begin - reached} bytes between {last} and tensor {named(name)} belong to no tensor"
            )
        reached, last = tensor.end, f"tensor {named(name)}"
    if reached < file_bytes:
        raise UnsoundFileError(f"{file_bytes - reached} bytes behind {last} belong to no tensor")
