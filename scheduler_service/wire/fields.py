"""Converts the core's types to messages with fields of the same names. Adding a field to such a type therefore requires
only a line in a .proto file.

Encoding a type raises an error if the message has no field for one of the type's fields. Fields with a single value are
always written, even if the value is the default. If a recording is older than a field, the field's value is missing and
the code's default is used.

Long columns of numbers are the largest part of a request's cost on the event loop. Protobuf copies numbers from an
array at 55 ns or more each. From a list protobuf copies numbers at 15 ns each; creating the list takes 12 ns more. If
the numbers are already bytes in protobuf's wire format, copying takes 4 ns a number. `fill_column` packs numbers into
such bytes in 6 ns a number.
"""

import enum
import functools
import inspect
import types
import typing
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from scheduler_service.core import SamplingParams
from scheduler_service.wire.sampling import RequestSampling

SHORT = 512
"""Minimum length of a column that this module packs. For shorter columns, protobuf's own encoding is faster."""


def fill_column(message: Message, name: str, numbers: Sequence[int]) -> None:
    """Set an empty repeated uint32 field."""
    if len(numbers) < SHORT:
        getattr(message, name).extend(numbers)
    else:
        field = message.DESCRIPTOR.fields_by_name[name]
        packed = _varints(np.asarray(numbers, dtype=np.uint32))
        message.MergeFromString(_varints(np.array([field.number << 3 | 2, len(packed)], dtype=np.uint32)) + packed)


def _varints(numbers: npt.NDArray[np.uint32]) -> bytes:
    """Encode numbers as protobuf's varints: seven bits per byte, low bits first. In the encoding of a number, every
    byte but the last has its high bit set.
    """
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
# Type of a protobuf enum's descriptor. Protobuf's C and Python implementations have no common type for it.
EnumDescriptor = Any
FieldDescriptor = Any
_COMPLETE: Mapping[type, type] = {SamplingParams: RequestSampling}
"""Classes that are decoded in place of a type of the core. A type is listed if the core's type has only the fields that
planning reads, and the message has more.
"""


def encode_fields(of: type, value: object, message: Message) -> None:
    """Write a value into a message: one field for each parameter of the constructor of the value's class."""
    for name in _hints(of):
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            raise ValueError(f"{message.DESCRIPTOR.name} has no field for {of.__name__}.{name}")
        _write(message, field, getattr(value, name))


def decode_fields(of: type[T], message: Message) -> T:
    """Create a value from its message. Raises ValueError if a field is missing or the class refuses a value."""
    readers = _readers(of, message.DESCRIPTOR)  # type: ignore[arg-type]
    try:
        return of(**{field.name: readers[field.name](value) for field, value in message.ListFields()})
    except TypeError as error:
        raise ValueError(f"{message.DESCRIPTOR.name} is incomplete: {error}") from error


def encode_enum(kind: EnumDescriptor, member: enum.Enum) -> int:
    """The number of the protobuf value for an enum member. The value's name is the member's name with the enum's
    prefix.
    """
    return int(kind.values_by_name[_prefix(kind) + member.name].number)


def decode_enum(of: type[T], kind: EnumDescriptor, number: int) -> T:
    """The enum member with the given number. Raises ValueError if no member has the number."""
    value = kind.values_by_number.get(number)
    name = value.name.removeprefix(_prefix(kind)) if value else ""
    if name not in of.__members__:  # type: ignore[attr-defined]
        raise ValueError(f"{number} is no {kind.name}")
    return of[name]  # type: ignore[index, no-any-return]


@functools.cache  # without the cache, reading the constructor would take 20 µs for each request
def _hints(of: type) -> dict[str, Any]:
    """The parameters of a class's constructor, and their types."""
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
        else:  # for TokenSequence
            for item in value:
                column.add(token_ids=item)
    elif field.message_type is not None:
        encode_fields(type(value), value, getattr(message, name))
    else:
        setattr(message, name, value)


@functools.cache
def _readers(of: type, descriptor: Any) -> dict[str, Callable[[Any], Any]]:
    """The functions that read a message's fields, by field name."""
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
        return tuple if field.message_type is None else _read_sequences
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return lambda number: decode_enum(hint, field.enum_type, number)
    if field.message_type is None:
        return _read_plain
    complete = _COMPLETE.get(hint, hint)
    return lambda message: decode_fields(complete, message)


def _read_plain(value: Any) -> Any:
    return value


def _read_sequences(messages: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(item.token_ids) for item in messages)
