"""How many fields a message has, counted before it is parsed, because parsing holds the interpreter's lock.

The smallest part of a message, such as a chat message without role and content, takes two bytes and 20 to 90 ns to
parse: a request of 1.5 MB may have 786,000 of them. Of each field, only where the next one begins is read here.
"""

from functools import cache

from google.protobuf.descriptor import Descriptor

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10


def has_more_fields(data: bytes, message: Descriptor, most: int) -> bool:
    """Whether an encoded message has more than `most` fields; 0.3 µs for each that is counted.

    Fields of its parts count as well, but not fields of parts that have no parts themselves: numbers and strings are
    quickly parsed. A packed list is one field. Bytes that are no message are left to the parser, which stops where this
    function stops.
    """
    if len(data) <= most:
        return False
    try:
        return _count(data, 0, len(data), message, most) > most
    except (IndexError, ValueError):
        return False


def _count(data: bytes, position: int, end: int, message: Descriptor, most: int) -> int:
    nested = _nested_parts(message)
    count = 0
    while position < end and count <= most:
        count += 1
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _varint(data, position)
            if length and tag >> 3 in nested:
                count += _count(data, position, position + length, nested[tag >> 3], most - count)
            position += length
        elif kind == _VARINT:
            _, position = _varint(data, position)
        elif kind == _EIGHT_BYTES:
            position += 8
        elif kind == _FOUR_BYTES:
            position += 4
    return count


@cache
def _nested_parts(message: Descriptor) -> dict[int, Descriptor]:
    """By the numbers of their fields, the parts of a message that have parts."""
    parts = {field.number: field.message_type for field in message.fields if field.message_type is not None}
    return {number: part for number, part in parts.items() if any(field.message_type for field in part.fields)}


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number that begins at a position, and the position behind it. Raises IndexError or ValueError."""
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
