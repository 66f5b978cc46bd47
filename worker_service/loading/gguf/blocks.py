"""Reads the quantised weights of a converted GGUF file as `GroupedWeight`s. A block contains 32 or 256 neighbouring
weights of one output, in 4 to 8 bits, and their scales. The layouts are from llama.cpp's ggml-common.h and the Python
package gguf."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kernels.ops import GroupedWeight
from pagewire_common.start_error import StartError
from worker_service.loading.files.file_version import check_unchanged, version_of
from worker_service.loading.files.safetensors_header import read_header
from worker_service.loading.files.weight_files import read_tensor
from worker_service.wording import named, shown

FILE = "gguf_blocks.safetensors"
"""File in a converted model's folder: quantised weights [outputs, bytes of a row]. Its metadata has the block types."""

_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Numbers [blocks, inputs], scales [blocks, groups], minimums [blocks, groups], units [blocks, 2 or 1]."""


def _float16(blocks: Tensor, *places: int) -> Tensor:
    """The float16 numbers at byte offsets `places` of each block, [blocks, places]."""
    return torch.cat([blocks[:, place : place + 2] for place in places], dim=1).view(torch.float16)


def _halves(bytes_: Tensor) -> Tensor:
    """Split bytes into 4-bit numbers: all lower halves, then all upper halves."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)


def _fifth_bits(blocks: Tensor, place: int) -> Tensor:
    """The fifth bits of 32 numbers, from 4 bytes at offset `place`: [blocks, 32], 16 or 0."""
    bits = blocks[:, place : place + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


def _q4_0(blocks: Tensor) -> _Parts:
    return _halves(blocks[:, 2:]), _float16(blocks, 0), None, None


def _q4_1(blocks: Tensor) -> _Parts:
    return _halves(blocks[:, 4:]), _float16(blocks, 0), -_float16(blocks, 2), None


def _q5_0(blocks: Tensor) -> _Parts:
    return _halves(blocks[:, 6:]) | _fifth_bits(blocks, 2), _float16(blocks, 0), None, None


def _q5_1(blocks: Tensor) -> _Parts:
    return _halves(blocks[:, 8:]) | _fifth_bits(blocks, 4), _float16(blocks, 0), -_float16(blocks, 2), None


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:] ^ 128, _float16(blocks, 0), None, None  # int8 plus 128


def _scales_of_eight(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, minimums and units of Q4_K and Q5_K: two units, then 8 scales and 8 minimums of 6 bits in 12 bytes."""
    packed = blocks[:, 4:16]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), dim=1)
    minimums = torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), dim=1)
    return scales, minimums, _float16(blocks, 0, 2)


def _q4_k(blocks: Tensor) -> _Parts:
    return _halves(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), *_scales_of_eight(blocks)


def _q5_k(blocks: Tensor) -> _Parts:
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    fifth = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return low | fifth.flatten(1) << 4, *_scales_of_eight(blocks)


def _q6_k(blocks: Tensor) -> _Parts:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return low | pairs.flatten(1) << 4, scales, None, _float16(blocks, 208)


_TYPES: dict[str, tuple[int, int, int, Callable[[Tensor], _Parts]]] = {
    "Q4_0": (18, 32, 4, _q4_0),
    "Q4_1": (20, 32, 4, _q4_1),
    "Q5_0": (22, 32, 5, _q5_0),
    "Q5_1": (24, 32, 5, _q5_1),
    "Q8_0": (34, 32, 8, _q8_0),
    "Q4_K": (144, 256, 4, _q4_k),
    "Q5_K": (176, 256, 5, _q5_k),
    "Q6_K": (210, 256, 6, _q6_k),
}
"""Block types: bytes of a block, inputs of a block, bits of a weight, reader."""
TYPES = frozenset(_TYPES)


def grouped_weight(rows: Tensor, kind: str) -> GroupedWeight:
    """rows: [outputs, bytes]; kind: a key of TYPES. Raises ValueError if rows are not whole blocks."""
    num_bytes, size, bits, read = _TYPES[kind]
    if rows.dim() != 2 or rows.dtype is not torch.uint8 or not rows.numel() or rows.shape[1] % num_bytes:
        raise ValueError(f"rows of {list(rows.shape)} {rows.dtype} are no blocks of {kind}")
    found: tuple[list[Tensor], ...] = ([], [], [], [])
    for part in torch.split(rows, max(1, 2**20 // rows.shape[1])):  # 1 MiB stays in a core's cache
        for tensors, tensor in zip(found, read(part.reshape(-1, num_bytes)), strict=True):
            if tensor is not None:
                tensors.append(tensor.reshape(len(part), -1))
    numbers, scales, minimums, units = (torch.cat(tensors) if tensors else None for tensors in found)
    assert numbers is not None
    assert scales is not None
    if not all(part.isfinite().all() for part in (scales, minimums, units) if part is not None):
        raise ValueError(f"a scale of {kind} is not finite")
    if units is not None:
        units = units.view(len(rows), numbers.shape[1] // size, -1)
    return GroupedWeight(numbers, scales, minimums, bits, units)


class GgufBlocks(Mapping[str, GroupedWeight]):
    """Quantised weights by their names in the converted model."""

    def __init__(self, folder: Path) -> None:
        """folder: of a converted model. Raises StartError if its file of quantised weights cannot be read."""
        self._file = folder / FILE
        if not self._file.is_file():
            raise StartError(f"{folder} was not converted from a GGUF file with weights of {', '.join(sorted(TYPES))}")
        self._version = version_of(self._file)
        header = read_header(self._file)
        self._tensors = header.tensors
        self._types = {name: header.metadata.get(name, "") for name in header.tensors}
        for name, kind in self._types.items():
            if kind not in TYPES:
                raise StartError(f"{self._file} cannot be read: the type of {named(name)} is {shown(kind)}")

    def __getitem__(self, name: str) -> GroupedWeight:
        """Raises KeyError for an unquantised weight, and StartError if reading fails."""
        kind = self._types[name]
        try:
            return grouped_weight(self._rows(name), kind)
        except ValueError as error:
            raise StartError(f"{self._file}: {name}: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def digest(self) -> str:
        """SHA-256 of all quantised weights, in hexadecimal. Raises StartError."""
        # Sorted, because safetensors writes metadata in varying order and all workers need the same digest.
        digest = hashlib.sha256()
        for name, kind in sorted(self._types.items()):
            rows = self._rows(name)
            digest.update(f"{name} {kind} {rows.dtype} {list(rows.shape)}\n".encode())
            digest.update(rows.numpy().data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._types)

    def _rows(self, name: str) -> Tensor:
        """[outputs, bytes of a row]. Raises StartError, also if the file has changed since its digest."""
        tensor = self._tensors[name]
        if tensor.dtype != "U8":
            raise StartError(f"{self._file} cannot be read: the blocks of {named(name)} are {tensor.dtype}")
        rows = read_tensor(tensor, name, torch.uint8)
        check_unchanged(self._file, self._version)
        return rows
