"""The format of a recording: frames of length, checksum and event. Lengths are checked before an event is read."""

import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.proto import serialize_length_prefixed

from pagewire.v1 import recording_pb2 as pb

FORMAT = "pagewire recording"
VERSION = 3
MAX_EVENT_BYTES = 128 << 20  # twice the size of the largest gRPC message to a worker
MAX_VARINT_BYTES = 10


class RecordingError(ValueError):
    """The file is unusable from the byte that the message names."""


class ReadEvent(NamedTuple):
    """One event; `offset` and `end` in bytes of the file. The header is event 0."""

    number: int
    offset: int
    end: int
    event: pb.RecordedEvent


def frame(event: pb.RecordedEvent) -> bytes:
    """The event's bytes in the file."""
    data = event.SerializeToString()
    if len(data) > MAX_EVENT_BYTES:
        raise ValueError(f"an event of {len(data)} bytes is larger than {MAX_EVENT_BYTES}")
    buffer = io.BytesIO()
    serialize_length_prefixed(pb.RecordingFrame(checksum=zlib.crc32(data), event=data), buffer)
    return buffer.getvalue()


def read_events(path: Path) -> Iterator[ReadEvent]:
    """Yield every event, the header first. Raises RecordingError at the first invalid event."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise RecordingError(f"{path} is empty: nothing was recorded")
            header = _read_header(file, size, path)
            yield header
            number, offset = 1, header.end
            while offset < size:
                event = _read_event(file, number, offset, size)
                yield event
                number, offset = number + 1, event.end
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error


def _read_header(file: io.BufferedReader, size: int, path: Path) -> ReadEvent:
    try:
        first = _read_event(file, 0, 0, size)
    except RecordingError as error:
        raise RecordingError(f"{path} is not a recording, or damaged from its beginning: {error}") from error
    if first.event.header.format != FORMAT:
        raise RecordingError(f"{path} is not a recording: byte 0 begins no header")
    if first.event.header.version != VERSION:
        raise RecordingError(f"{path} has version {first.event.header.version} of the format; {VERSION} can be read")
    return first


def _read_event(file: io.BufferedReader, number: int, offset: int, size: int) -> ReadEvent:
    def damaged(what: str) -> RecordingError:
        return RecordingError(f"event {number} at byte {offset} {what}")

    length = shift = 0
    while True:
        if not (byte := file.read(1)):
            raise damaged("is cut off within its length")
        length |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
        if shift >= 7 * MAX_VARINT_BYTES:
            raise damaged("has no length")
    start = file.tell()
    if length > MAX_EVENT_BYTES + 16:  # 16 bytes for the fields of a frame beside the event
        raise damaged(f"claims {length} bytes; the most that an event has is {MAX_EVENT_BYTES}")
    if start + length > size:
        raise damaged(f"is cut off: it has {size - start} of {length} bytes")
    try:
        framed = pb.RecordingFrame.FromString(file.read(length))
        if zlib.crc32(framed.event) != framed.checksum:
            raise damaged("is damaged: its checksum is another")
        event = pb.RecordedEvent.FromString(framed.event)
    except DecodeError as error:
        raise damaged("is damaged: it is no event") from error
    if event.WhichOneof("event") is None:
        raise damaged("is of a kind that this program does not know")
    return ReadEvent(number, offset, start + length, event)
