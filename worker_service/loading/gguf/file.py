"""Reads the headers of a GGUF model, one file or parts NAME-00001-of-00003.gguf and so on in a folder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagewire_common.start_error import StartError
from worker_service.errors import UnsoundFileError
from worker_service.loading.gguf.header import GgufHeader, GgufTensor, Value, read_gguf_header
from worker_service.wording import named, shown

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_POSITIVE = (".block_count", ".embedding_length", ".attention.head_count")
_OF_A_PART = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Keys and tensors of a model, without the keys about the split into parts."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def model_name(file: Path) -> str:
    """The file name without suffix and part number."""
    found = _PART.fullmatch(file.name)
    return found["name"] if found else file.stem


def find_parts(file: Path) -> list[Path]:
    """All parts of the model of `file`. Raises StartError if a part is missing."""
    found = _PART.fullmatch(file.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [file]
    count = int(found["count"])
    parts: list[Path] = []
    for number in range(1, count + 1):
        parts.append(file.with_name(f"{found['name']}-{number:05}-of-{count:05}.gguf"))
        if not parts[-1].is_file():
            raise StartError(f"{file} is one of {count} parts of a model, and {parts[-1]} is missing")
    return parts


def read_gguf(parts: Sequence[Path]) -> GgufFile:
    """Read and join the parts' headers, in order. A StartError names the faulty file."""
    headers = [read_gguf_header(part) for part in parts]
    metadata: dict[str, Value] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, (part, header) in enumerate(zip(parts, headers, strict=True)):
        try:
            _check_part(header, number, len(parts))
            _join(metadata, {key: value for key, value in header.metadata.items() if key not in _OF_A_PART})
            if twice := sorted(tensors.keys() & header.tensors):
                raise UnsoundFileError(f"another part has its tensor {named(twice[0])} too")
            tensors |= header.tensors
        except UnsoundFileError as error:
            raise StartError(f"{part} is not a sound GGUF file: {error}") from error
    try:
        _check_counts(metadata, tensors, headers[0].metadata.get("split.tensors.count"))
    except UnsoundFileError as error:
        raise StartError(f"{parts[0]} is not a sound GGUF file: {error}") from error
    return GgufFile(parts[0], metadata, tensors)


def _check_part(header: GgufHeader, number: int, count: int) -> None:
    said_count = header.metadata.get("split.count", 0)
    if type(said_count) is not int or (said_count or 1) != count:
        raise UnsoundFileError(
            f"it is one of {shown(said_count)} parts by its split.count, and one of {count} by its name; "
            "parts are named NAME-00001-of-00003.gguf and so on"
        )
    said_number = header.metadata.get("split.no", 0)
    if type(said_number) is not int or said_number != number:
        raise UnsoundFileError(f"its split.no is {shown(said_number)}, and its name says {number}")


def _join(metadata: dict[str, Value], of_part: Mapping[str, Value]) -> None:
    for key, value in of_part.items():
        if key in metadata and not np.array_equal(np.asarray(metadata[key]), np.asarray(value)):
            raise UnsoundFileError(f"its {named(key)} differs from the first part's")
        metadata[key] = value


def _check_counts(metadata: Mapping[str, Value], tensors: Mapping[str, GgufTensor], said_tensors: Value) -> None:
    """Refuse sizes in keys that contradict the tensors; wrong sizes could make the conversion allocate too much
    memory."""
    if said_tensors is not None and not (type(said_tensors) is int and said_tensors == len(tensors)):
        raise UnsoundFileError(f"split.tensors.count is {shown(said_tensors)}, and the parts have {len(tensors)}")
    num_blocks = len({block[1] for name in tensors if (block := _BLOCK.match(name))})
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    own = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        if type(value) is not int or not key.startswith(own):
            continue
        if key.endswith(_POSITIVE) and value < 1:
            raise UnsoundFileError(f"{named(key)} is {value}")
        if key.endswith(".block_count") and value != num_blocks:
            raise UnsoundFileError(f"{named(key)} is {value}, and there are tensors of {num_blocks} blocks")
        if key.endswith(".expert_count") and value > max(largest, len(tensors)):
            raise UnsoundFileError(f"{named(key)} is {value}, and no tensor has so many parts")
