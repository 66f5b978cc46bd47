"""Counts the fields of a message before the message is parsed, because parsing holds the interpreter's lock. Finds
unknown fields, too.

The smallest submessage, such as a chat message without role and content, has two bytes and takes 20 to 90 ns to parse.
A request of 1.5 MB may contain 786,000 submessages of two bytes. Counting only finds where each field begins.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10


def has_more_fields(data: bytes, message: Descriptor, most: int) -> bool:
    """Whether an encoded message has more than `most` fields. Counting takes 0.3 µs for each counted field.

    Fields of submessages are counted too. A submessage is counted as one field if it contains only numbers and single
    strings, because it is parsed quickly. A packed list of numbers counts as one field. Because varints may be padded,
    every four bytes of a field's tag and of its number or length count as a further field. In an invalid message,
    counting stops where the parser stops, and the parser reports the error.
    """
    if len(data) <= most:
        return False
    try:
        return _count(data, 0, len(data), message, most) > most
    except (IndexError, ValueError):
        return False


def num_opaque_bytes(data: bytes, message: Descriptor) -> int:
    """The number of bytes in `bytes` fields of an encoded message and its submessages.

    The parser only copies the contents of `bytes` fields. In an invalid message, bytes are counted up to the place
    where a parser stops.
    """
    found = 0
    with suppress(IndexError, ValueError):
        for start, stop, field in _long_fields(data, 0, len(data), message):
            if field.type == FieldDescriptor.TYPE_BYTES:
                found += stop - start
            elif field.message_type is not None and not field.is_repeated:
                for first, last, part in _long_fields(data, start, stop, field.message_type):
                    found += last - first if part.type == FieldDescriptor.TYPE_BYTES else 0
    return found


def _long_fields(
    data: bytes, position: int, end: int, message: Descriptor
) -> Iterator[tuple[int, int, FieldDescriptor]]:
    """Yield the start, the end and the descriptor of each field that has a length."""
    while position < end:
        tag, position = _varint(data, position)
        kind, field = tag & 7, message.fields_by_number.get(tag >> 3)
        if kind == _LENGTH:
            length, position = _varint(data, position)
            if field is not None:
                yield position, min(position + length, end), field
            position += length
        elif kind == _VARINT:
            _, position = _varint(data, position)
        else:
            position += 8 if kind == _EIGHT_BYTES else 4 if kind == _FOUR_BYTES else 0


def _count(data: bytes, position: int, end: int, message: Descriptor, most: int) -> int:
    nested = _nested_parts(message)
    count = 0
    while position < end and count <= most:
        start = position
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _varint(data, position)
            count += 1 + (position - start) // 4
            if length and tag >> 3 in nested:
                count += _count(data, position, position + length, nested[tag >> 3], most - count)
            position += length
        elif kind == _VARINT:
            _, position = _varint(data, position)
            count += 1 + (position - start) // 4
        else:
            count += 1 + (position - start) // 4
            position += 8 if kind == _EIGHT_BYTES else 4 if kind == _FOUR_BYTES else 0
    return count


@cache
def _nested_parts(message: Descriptor) -> dict[int, Descriptor]:
    """A message's submessages that contain further submessages or lists of strings, by field number."""
    parts = {field.number: field.message_type for field in message.fields if field.message_type is not None}
    return {number: part for number, part in parts.items() if any(map(_takes_long, part.fields))}


def _takes_long(field: FieldDescriptor) -> bool:
    is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return field.message_type is not None or (is_text and field.is_repeated)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Read the varint at a position. Returns the varint's value and the position after the varint. Raises IndexError or
    ValueError.
    """
    number = data[position]
    if number < 0x80:
        return number, position + 1
    number &= 0x7F
    for place in range(1, _LONGEST_VARINT):
        byte = data[position + place]
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, position + place + 1
    raise ValueError


def unknown_field(message: Message) -> str:
    """The name of the first unknown field in a message or its submessages. The name is empty if all fields are known.

    The search takes 0.12 µs for each message and submessage. Lists of numbers are not searched. Maps are skipped,
    because in all requests the values of maps are numbers.
    """
    if len(unknown := UnknownFieldSet(message)):
        return f"field {unknown[0].field_number} of {message.DESCRIPTOR.name}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            if found := unknown_field(part):
                return found
    return ""
