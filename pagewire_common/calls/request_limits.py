"""Limits on a request, checked before parsing, because parsing holds the GIL; and unknown fields, found after it.

An empty chat message has two bytes and takes 20 to 90 ns to parse: a request of 1.5 MB may have 786,000 fields.
"""

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

MAX_FIELDS = 6 << 10
"""Fields of a request, quickly counted and parsed: more than a valid request with lists of maximum length has."""
UNREADABLE = "the request's bytes are not a valid message of this method"
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10

request_size: ContextVar[int] = ContextVar("request_size", default=0)
"""Bytes of this call's serialized request. The parsed message reports less if a single field is repeated, but keeps
all.
"""


class RequestLimits(NamedTuple):
    num_bytes: int
    num_opaque_bytes: int = 0
    """Additional bytes of fields that are not parsed, such as a sound or embeddings."""
    will_grow: str = ""
    """Why a larger request may be accepted later; empty if it never is."""


class Unparsed(NamedTuple):
    """A placeholder for a request that would take too long to parse."""

    reason: str
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT


def refusing_invalid(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser that returns `Unparsed` for invalid bytes: gRPC would send an exception's text to the client."""

    def readable(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Unparsed(UNREADABLE)

    return readable


def refusing_unknown(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser that refuses unknown fields, because an answer that ignores them would be wrong."""

    def known(data: bytes) -> Any:
        request = parse(data)
        # Discarding unknown fields takes 1 ms for 4,096 chat messages; a search for them would take 8 ms.
        if isinstance(request, Message) and _discards_unknown(request) and (found := unknown_field(parse(data))):
            return Unparsed(
                f"the request has {found}, which this server does not know: leave it out, or use a newer server"
            )
        return request

    return known


def refusing_large(
    parse: Callable[[bytes], Any], descriptor: Any, limits: Callable[[], RequestLimits]
) -> Callable[[bytes], Any]:
    def bounded(data: bytes) -> Any:
        most, most_opaque, will_grow = limits()
        if len(data) > most and len(data) - min(most_opaque and num_opaque_bytes(data, descriptor), most_opaque) > most:
            reason = f"the request has {len(data)} bytes; at most {most} are allowed here"
            if will_grow:
                return Unparsed(f"{reason} {will_grow}", grpc.StatusCode.UNAVAILABLE)
            return Unparsed(reason)
        if has_more_fields(data, descriptor, MAX_FIELDS):
            return Unparsed(
                f"the request has more than {MAX_FIELDS} fields, counting entries of lists such as chat.messages; "
                "send shorter lists, and pack lists of numbers"
            )
        request_size.set(len(data))
        return parse(data)

    return bounded


def has_more_fields(data: bytes, message: Descriptor, most: int) -> bool:
    """Whether an encoded message has more than `most` fields, at 0.3 µs a field.

    A submessage of numbers and single strings, or a packed list, is one field. So are the numbers and single strings of
    an entry of a list together. Varints may be padded, so every four bytes of tag and number or length count as a
    further field. Counting stops where the message is invalid.
    """
    if len(data) <= most:
        return False
    try:
        return _count(data, 0, len(data), message, most) > most
    except (IndexError, ValueError):
        return False


def num_opaque_bytes(data: bytes, message: Descriptor) -> int:
    """The bytes of `bytes` fields, which the parser only copies, among the first `MAX_FIELDS` fields, up to where the
    message is invalid."""
    found = _Opaque()
    with suppress(IndexError, ValueError):
        found.add(data, 0, len(data), message)
    return found.num_bytes


class _Opaque:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_fields = 0

    def add(self, data: bytes, position: int, end: int, message: Descriptor) -> None:
        """Count the fields of a message. Raises IndexError or ValueError where it is invalid."""
        while position < end and self._num_fields < MAX_FIELDS:
            self._num_fields += 1
            tag, position = _varint(data, position)
            kind, field = tag & 7, message.fields_by_number.get(tag >> 3)
            if kind == _LENGTH:
                length, position = _varint(data, position)
                stop = min(position + length, end)
                if field is not None and field.message_type is not None:
                    self.add(data, position, stop, field.message_type)
                elif field is not None and field.type == FieldDescriptor.TYPE_BYTES:
                    self.num_bytes += stop - position
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
                part, free = nested[tag >> 3]
                count += max(0, _count(data, position, position + length, part, most - count + free) - free)
            position += length
        elif kind == _VARINT:
            _, position = _varint(data, position)
            count += 1 + (position - start) // 4
        else:
            count += 1 + (position - start) // 4
            position += 8 if kind == _EIGHT_BYTES else 4 if kind == _FOUR_BYTES else 0
    return count


@cache
def _nested_parts(message: Descriptor) -> dict[int, tuple[Descriptor, int]]:
    """Submessages that contain further submessages or lists of strings, by field number, and the number of their fields
    that are not counted: in an entry of a list, such as a chat message, one number or string of each single field."""
    parts = {}
    for field in message.fields:
        if (part := field.message_type) is not None and any(map(_takes_long, part.fields)):
            singles = sum(one.message_type is None and not one.is_repeated for one in part.fields)
            parts[field.number] = part, singles if field.is_repeated else 0
    return parts


def _takes_long(field: FieldDescriptor) -> bool:
    is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return field.message_type is not None or (is_text and field.is_repeated)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The varint at a position, and the position after it. Raises IndexError or ValueError."""
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


def _discards_unknown(message: Message) -> bool:
    """Discard a message's unknown fields, and return whether there were any."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    return message.ByteSize() != size


def unknown_field(message: Message) -> str:
    """The first unknown field in a message or its submessages, or empty: 2 µs a message.

    Lists of numbers and maps, which have numbers as values, are not searched.
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
