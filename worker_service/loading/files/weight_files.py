"""Checks the safetensors files of a Hugging Face directory, and reads tensors into their final places. A buffer of a
few megabytes holds the data under way, so no weight is in memory twice."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from io import FileIO
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.loading.files.file_version import check_unchanged, version_of
from worker_service.loading.files.json_file import read_json
from worker_service.loading.files.left_tensors import check_none_left
from worker_service.loading.files.pickled_weights import refuse_missing_weights
from worker_service.loading.files.safetensors_header import SafetensorsHeader, StoredTensor, read_header
from worker_service.loading.files.tensor_digests import tensor_digests
from worker_service.loading.files.tensor_names import ZERO_IF_MISSING, spellings
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.wording import named, shown

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTIZED = {
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8
}  # fmt: skip
"""Types that only quantised weights, scales and zero points may have."""
_PIECE_BYTES = 8 << 20


class WeightFiles:
    """model.safetensors, or the files named by model.safetensors.index.json. Methods raise StartError."""

    def __init__(self, path: Path) -> None:
        """Find the files. Headers are read later, when needed."""
        self._index = path / "model.safetensors.index.json"
        self._shard_of = _read_index(self._index) if self._index.exists() else {}
        # The last part of a path only, so that the index cannot name a file outside the folder.
        names = sorted({Path(name).name for name in self._shard_of.values()}) or ["model.safetensors"]
        self._files = [path / name for name in names]
        for file in self._files:
            if not file.is_file():
                refuse_missing_weights(file, self._index.name if self._shard_of else "")
            if not os.access(file, os.R_OK):
                raise StartError(f"{file} may not be read by this user")
        self._versions = [version_of(file) for file in self._files]
        self._stand_ins: dict[str, str] = {}

    @cached_property
    def _headers(self) -> dict[Path, SafetensorsHeader]:
        return {file: read_header(file) for file in self._files}

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name. The index decides between files with the same tensor."""
        tensors = {name: tensor for header in self._headers.values() for name, tensor in header.tensors.items()}
        for name, shard in self._shard_of.items():
            file = self._index.with_name(Path(shard).name)
            if name not in self._headers[file].tensors:
                raise StartError(f"{file} lacks the tensor {named(name)}, which {self._index} says is there")
            tensors[name] = self._headers[file].tensors[name]
        return tensors

    @cached_property
    def dtypes(self) -> Mapping[str, str]:
        """Types in the notation of safetensors, by tensor name."""
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    def shape(self, name: str) -> Sequence[int]:
        """Empty if there is no such tensor."""
        found = self._find(name)
        return () if found is None else found.shape

    def read(self, name: str) -> Tensor:
        """Read a whole tensor in its stored type."""
        return self._read(name, self._tensors[name])

    def read_row(self, name: str, number: int) -> Tensor:
        """Read the part of a tensor with this first index, in its stored type."""
        whole = self._tensors[self._stored_name(name) or name]
        begin = whole.begin + number * whole.row_bytes
        return self._read(name, replace(whole, shape=whole.shape[1:], begin=begin, end=begin + whole.row_bytes))

    def _read(self, name: str, tensor: StoredTensor) -> Tensor:
        dtype = (_DTYPES | _QUANTIZED).get(tensor.dtype)
        if dtype is None:
            raise StartError(f"{tensor.file}: tensor {named(name)} is of {tensor.dtype}, which is not read")
        found = read_tensor(tensor, name, dtype)
        self._check_unchanged()
        return found

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Yield names, types, shapes and digests, whatever the split into files. Reads all data."""
        digests = tensor_digests(self._tensors, torch.get_num_threads())
        self._check_unchanged()
        for name, tensor in sorted(self._tensors.items()):
            yield f"{name} {tensor.dtype} {list(tensor.shape)}", digests[name]

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """Also refuses tensors that are not floating-point."""
        for name, place in expected.items():
            shape = cuts[name].shape if name in cuts else place.shape
            tensor = self._find(name)
            if tensor is None:
                if name in ZERO_IF_MISSING:
                    continue
                where = self._index if self._shard_of else self._files[0]
                raise StartError(f"{where}: the weights lack the tensor {name}, which config.json asks for")
            if tensor.shape != shape or tensor.dtype not in _DTYPES:
                raise StartError(
                    f"{tensor.file}: tensor {name} is {shown(list(tensor.shape))} of {tensor.dtype} "
                    f"where config.json asks for {list(shape)} of floating point"
                )

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        stored = {found for name in taken if (found := self._stored_name(name))}
        check_none_left(self._tensors, stored, ignored, self.read)

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        """See `Weights.own`. Replaces a missing source of tied tensors by the first of them."""
        for name, other in tied.items():
            if self._find(name) and not self._find(other):
                self._stand_ins[other] = name
        return frozenset(name for name, other in tied.items() if self._find(name) and not self._are_equal(name, other))

    def _are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bytes. Files of torch's own code store both of two tied tensors."""
        one, two = self._find(name), self._find(other)
        if one == two:
            return True
        if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        try:
            with open(one.file, "rb") as first, open(two.file, "rb") as second:
                first.seek(one.begin)
                second.seek(two.begin)
                pieces = [_PIECE_BYTES] * (one.num_bytes // _PIECE_BYTES) + [one.num_bytes % _PIECE_BYTES]
                are_equal = all(first.read(count) == second.read(count) for count in pieces)
        except OSError as error:
            raise StartError(f"cannot read {one.file}: {error.strerror}") from error
        self._check_unchanged()
        return are_equal

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """See `Weights.load_into`. Each file is read once, from front to back."""
        self.check(places, cuts)
        stored = {name: tensor for name in places if (tensor := self._find(name)) is not None}
        for name in places.keys() - stored:
            places[name].zero_()
        in_order = sorted(stored, key=lambda name: (stored[name].file, stored[name].begin))
        parts = {name: cuts.get(name) or _whole(tensor) for name, tensor in stored.items()}
        buffer = memoryview(bytearray(max([_PIECE_BYTES, *(tensor.row_bytes for tensor in stored.values())])))
        for file, names in groupby(in_order, key=lambda name: stored[name].file):
            try:
                with open(file, "rb", buffering=0) as stream:
                    for name in names:
                        _fill(places[name], name, stored[name], parts[name], stream, buffer)
            except OSError as error:
                raise StartError(f"cannot read {file}: {error.strerror}") from error
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Refuse changed files: headers, digests and weights are read at different times."""
        for file, version in zip(self._files, self._versions, strict=True):
            check_unchanged(file, version)

    def _find(self, name: str) -> StoredTensor | None:
        stored = self._stored_name(name)
        return None if stored is None else self._tensors[stored]

    def _stored_name(self, name: str) -> str | None:
        """The tensor's name in the files, or None."""
        names = (*spellings(name), *spellings(self._stand_ins.get(name, "")))
        return next((one for one in names if one in self._tensors), None)


def read_tensor(tensor: StoredTensor, name: str, dtype: torch.dtype) -> Tensor:
    """dtype: the type in the file. Raises StartError."""
    content = bytearray(tensor.num_bytes)
    try:
        with open(tensor.file, "rb", buffering=0) as stream:
            _read_exactly(stream, tensor.begin, memoryview(content), named(name), tensor.file)
    except OSError as error:
        raise StartError(f"cannot read {tensor.file}: {error.strerror}") from error
    found = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return found.view(tensor.shape)


def _read_index(file: Path) -> dict[str, str]:
    shard_of = read_json(file).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise StartError(f"{file}: there is no weight_map from tensors to files")
    return shard_of


def _whole(tensor: StoredTensor) -> Cut:
    rows, columns = (*tensor.shape, 1, 1)[:2]
    return Cut(tensor.shape, [range(rows)], range(columns))


def _num_bytes(tensor: StoredTensor, part: Cut) -> int:
    return sum(map(len, part.rows)) * _held(tensor, part)[1]


def _held(tensor: StoredTensor, part: Cut) -> tuple[int, int]:
    """Bytes of a row before this rank's columns, and bytes of these columns."""
    columns = tensor.shape[1] if len(tensor.shape) > 1 else 1
    column_bytes = tensor.row_bytes // (columns or 1)
    return part.columns.start * column_bytes, len(part.columns) * column_bytes


def _fill(place: Tensor, name: str, tensor: StoredTensor, part: Cut, stream: FileIO, buffer: memoryview) -> None:
    """Read as many rows at a time as fit into the buffer. `place` may have any strides."""
    skipped, width = _held(tensor, part)
    if not _num_bytes(tensor, part):
        return
    place, filled, most = (place if place.dim() else place.view(1)), 0, len(buffer) // width
    for stretch in part.rows:
        for first in range(stretch.start, stretch.stop, most):
            count = min(most, stretch.stop - first)
            piece = buffer[: count * width]
            begin = tensor.begin + first * tensor.row_bytes + skipped
            if width == tensor.row_bytes:
                _read_exactly(stream, begin, piece, name, tensor.file)
            else:
                for row in range(count):
                    of_row = piece[row * width : (row + 1) * width]
                    _read_exactly(stream, begin + row * tensor.row_bytes, of_row, name, tensor.file)
            rows = place[filled : filled + count]
            rows.copy_(torch.frombuffer(piece, dtype=_DTYPES[tensor.dtype]).view(rows.shape))
            filled += count


def _read_exactly(stream: FileIO, begin: int, piece: memoryview, name: str, file: Path) -> None:
    stream.seek(begin)
    while piece:
        if not (count := stream.readinto(piece)):
            raise StartError(f"{file} ends inside the tensor {name}; it became shorter since its header was read")
        piece = piece[count:]
