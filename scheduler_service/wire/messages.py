"""Converts the core's types to messages: with fields of the same names, and for the stream between a front end and the
engine.

Defaults are written too: a recording older than a field gets the code's default. Protobuf copies a number from an array
in 55 ns, from a list in 27 ns (the list included), and from its wire format in 4 ns. `fill_column` packs numbers into
the wire format in 6 ns each. A front end's long lists are bytes, because protobuf's lists take 50 ns a number to read.
"""

import asyncio
import enum
import functools
import inspect
import sys
import types
import typing
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.core import EncoderInput, ImagePart, PromptItem, SamplingParams, SequenceGroup
from scheduler_service.core.config import LayerGroup
from scheduler_service.wire.sampling import RequestSampling

SHORT = 512
"""Numbers; shorter columns are faster with protobuf's own encoding."""
KEY_BYTES = 32
"""Bytes of a key of the prefix cache."""
SECONDS_BETWEEN = 0.002
"""Seconds between messages of a busy stream of a front end. A message costs both processes together 70 to 150 µs, as do
the tokens of 100 sequences."""


def fill_column(message: Message, name: str, numbers: Sequence[int]) -> None:
    """Set an empty repeated uint32 field."""
    if len(numbers) < SHORT:
        getattr(message, name).extend(numbers)
    else:
        field = message.DESCRIPTOR.fields_by_name[name]
        packed = _varints(np.asarray(numbers, dtype=np.uint32))
        message.MergeFromString(_varints(np.array([field.number << 3 | 2, len(packed)], dtype=np.uint32)) + packed)


def _varints(numbers: npt.NDArray[np.uint32]) -> bytes:
    """Protobuf's varints: seven bits per byte, low bits first; all bytes of a number but the last have the high bit."""
    longest = max(1, -(-int(numbers.max()).bit_length() // 7))
    written = np.empty((len(numbers), longest), dtype=np.uint8)
    is_part = np.ones((len(numbers), longest), dtype=np.bool_)
    rest = numbers
    for place in range(longest):
        if place:
            np.not_equal(rest, 0, out=is_part[:, place])
            written[:, place - 1] |= is_part[:, place].view(np.uint8) << 7
        written[:, place] = rest & 0x7F
        rest = rest >> np.uint32(7)
    return written[is_part].tobytes()


T = TypeVar("T")
# Protobuf's C and Python implementations have no common type for descriptors.
EnumDescriptor = Any
FieldDescriptor = Any
_COMPLETE: Mapping[type, type] = {SamplingParams: RequestSampling}
"""Classes decoded in place of the core's types, which have only the fields that planning reads."""


def encode_fields(of: type, value: object, message: Message) -> None:
    """Write a field for each constructor parameter. Raises ValueError if the message lacks a field."""
    for name in _hints(of):
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            raise ValueError(f"{message.DESCRIPTOR.name} has no field for {of.__name__}.{name}")
        _write(message, field, getattr(value, name))


def decode_fields(of: type[T], message: Message) -> T:
    """Raises ValueError if a field is missing or the class refuses a value."""
    readers = _readers(of, message.DESCRIPTOR)  # type: ignore[arg-type]
    try:
        return of(**{field.name: readers[field.name](value) for field, value in message.ListFields()})
    except TypeError as error:
        raise ValueError(f"{message.DESCRIPTOR.name} is incomplete: {error}") from error


def encode_enum(kind: EnumDescriptor, member: enum.Enum) -> int:
    """The number of the protobuf value with the enum's prefix and the member's name."""
    return int(kind.values_by_name[_prefix(kind) + member.name].number)


def decode_enum(of: type[T], kind: EnumDescriptor, number: int) -> T:
    """Raises ValueError if no member has the number."""
    value = kind.values_by_number.get(number)
    name = value.name.removeprefix(_prefix(kind)) if value else ""
    if name not in of.__members__:  # type: ignore[attr-defined]
        raise ValueError(f"{number} is no {kind.name}")
    return of[name]  # type: ignore[index, no-any-return]


@functools.cache  # without the cache, reading the constructor would take 20 µs for each request
def _hints(of: type) -> dict[str, Any]:
    hints = typing.get_type_hints(of.__init__)  # type: ignore[misc]
    return {name: hints[name] for name in inspect.signature(of).parameters}


def _prefix(kind: EnumDescriptor) -> str:
    return str(kind.values[0].name).removesuffix("UNSPECIFIED")


def _write(message: Message, field: FieldDescriptor, value: Any) -> None:
    name = field.name
    if value is None:
        return
    if isinstance(value, enum.Enum):
        setattr(message, name, encode_enum(field.enum_type, value))
    elif isinstance(value, Mapping):
        getattr(message, name).update(value)
    elif isinstance(value, frozenset):
        getattr(message, name).extend(sorted(value))
    elif isinstance(value, tuple | list | array):
        column = getattr(message, name)
        if field.message_type is None:
            column.extend(value)
        else:
            for item in value:
                column.add(**_fields_of(item))
    elif field.message_type is not None:
        encode_fields(type(value), value, getattr(message, name))
    else:
        setattr(message, name, value)


@functools.cache
def _readers(of: type, descriptor: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: _reader(descriptor.fields_by_name[name], hint) for name, hint in _hints(of).items()}


def _reader(field: FieldDescriptor, hint: Any) -> Callable[[Any], Any]:
    if isinstance(hint, types.UnionType):  # the type is X | None, and the field is present
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    origin = typing.get_origin(hint)
    if origin is not None and issubclass(origin, Mapping):
        return dict
    if origin is frozenset:
        return frozenset
    if origin is not None:  # the type is a tuple or a list
        if typing.get_args(hint)[0] is LayerGroup:
            return _read_layer_groups
        if typing.get_args(hint)[0] is PromptItem:
            return read_items
        return tuple if field.message_type is None else _read_sequences
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return lambda number: decode_enum(hint, field.enum_type, number)
    if field.message_type is None:
        return _read_plain
    complete = _COMPLETE.get(hint, hint)
    return lambda message: decode_fields(complete, message)


def _read_plain(value: Any) -> Any:
    return value


def _read_layer_groups(messages: Any) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(one.block_size, one.window, one.chunked) for one in messages)


def read_items(messages: Any) -> tuple[PromptItem, ...]:
    """Items with equal digests share the data of the first."""
    data: dict[bytes, bytes] = {}
    return tuple(
        PromptItem(
            one.digest,
            one.start,
            one.num_embeddings,
            one.num_bytes,
            data.setdefault(one.digest, one.data),
            _read_image(one),
        )
        for one in messages
    )


def fill_items(column: Any, items: Sequence[PromptItem]) -> None:
    """Write items, and the data of equal digests once."""
    written = set[bytes]()
    for item in items:
        column.add(**item_fields(item if item.digest not in written else item._replace(data=b"")))
        written.add(item.digest)


def _read_image(item: Any) -> ImagePart | None:
    image = item.image
    return ImagePart(image.width, image.height, image.part) if item.HasField("image") else None


def item_fields(item: PromptItem) -> dict[str, Any]:
    return item._asdict() | {"image": item.image and item.image._asdict()}


def _fields_of(entry: Any) -> dict[str, Any]:
    if isinstance(entry, PromptItem):
        return item_fields(entry)
    return entry._asdict() if isinstance(entry, LayerGroup) else {"token_ids": entry}


def _read_sequences(messages: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(item.token_ids) for item in messages)


class Pace:
    __slots__ = ("_last", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = 0.0

    async def wait(self) -> None:
        pause = self._last + SECONDS_BETWEEN - self._loop.time()
        if pause > 0:
            await asyncio.sleep(pause)
        self._last = self._loop.time()


def pack(numbers: Sequence[int]) -> bytes:
    """Four bytes a number, low byte first."""
    packed = array("I", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> "array[int]":
    numbers = array("I")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def floats(data: bytes) -> "array[float]":
    """32-bit numbers, low byte first."""
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def encode_sampling(sampling: SamplingParams, submission: pb.Submit) -> None:
    encode_fields(type(sampling), replace(sampling, allowed_token_ids=()), submission.sampling)
    submission.allowed_token_ids = pack(sampling.allowed_token_ids)


def decode_group(request_id: str, submission: pb.Submit, now: float, adapter: str = "") -> SequenceGroup:
    """`adapter`: the fingerprint."""
    sampling = decode_fields(RequestSampling, submission.sampling)
    if submission.allowed_token_ids:
        sampling = replace(sampling, allowed_token_ids=unpack(submission.allowed_token_ids))
    group = SequenceGroup(
        request_id,
        unpack(submission.prompt_token_ids),
        sampling,
        submission.cache_root,
        priority=submission.priority,
        tenant=submission.tenant,
        arrived_at=now,
        output_token_ids=tuple(output.token_ids for output in submission.output_token_ids),
        ended=frozenset(submission.ended),
        adapter_id=adapter,
        encoder_input=(
            decode_fields(EncoderInput, submission.encoder_input) if submission.HasField("encoder_input") else None
        ),
        items=read_items(submission.items),
    )
    group.trace_parent = submission.trace_parent
    keys = submission.block_keys
    group.sequences[0].block_keys += [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    return group
