"""The ids of a stream's events. An id says what a server needs to repeat the stream up to the event, and is signed.

The tokens themselves are not in an id: with them, the bytes of a stream would grow with the square of its length.
"""

import secrets
import struct
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from scheduler_service.frontend.http.errors import HttpError, invalid

HEADER = "Last-Event-ID"
FIRST = "0"
"""The value of the header that asks for the ids of a stream from its beginning."""
_VERSION = b"event ids 1"
_MAC_BYTES = 10
_FIXED = struct.Struct("!8sIII")


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a response's ids and default seed. A repeated response has the same origin.

    `created`: Unix time in seconds.
    """

    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(8))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def base(self) -> str:
        """A hexadecimal text that only this response has."""
        return blake2b(self.nonce, digest_size=16).hexdigest()

    @property
    def seed(self) -> int:
        return int.from_bytes(blake2b(self.nonce, digest_size=8, person=b"seed").digest()) >> 1


class Position(NamedTuple):
    """The place of an event in its stream. An event belongs to the latest delta of an output before the event.

    `num_tokens`: tokens of each output before the delta. `output`, `num_new`: the delta's output and number of tokens.
    `num_events`: events before the delta. `num_sent`: events since then, with this event. `checksum`: of all tokens.
    """

    num_tokens: tuple[int, ...]
    output: int
    num_new: int
    num_events: int
    num_sent: int
    checksum: int


class EventIds:
    """Writes and reads the ids of a stream. `request`: a digest of what a client must repeat to resume the stream."""

    def __init__(self, secret: bytes, request: bytes) -> None:
        self._request = int.from_bytes(request[:4])
        self._signer = blake2b(request, key=secret, digest_size=_MAC_BYTES, person=_VERSION)

    def write(self, origin: Origin, position: Position) -> str:
        """The id of an event, in 3 µs."""
        said = _FIXED.pack(origin.nonce, origin.created, self._request, position.checksum)
        numbers = (position.output, position.num_new, position.num_events, position.num_sent, *position.num_tokens)
        said += _encode(numbers)
        return urlsafe_b64encode(said + self._mac(said)).decode().rstrip("=")

    def read(self, event_id: str, num_outputs: int) -> tuple[Origin, Position]:
        """Raises HttpError for an id of another request, and an id that no server with this secret has written."""
        try:
            data = urlsafe_b64decode(event_id + "=" * (-len(event_id) % 4))
            said, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
            nonce, created, request, checksum = _FIXED.unpack_from(said)
        except (ValueError, struct.error):
            raise invalid(f"{HEADER} is no id of an event of this server", HEADER) from None
        if request != self._request:
            reason = "send the same body to the same route and model, with an API key of the same tenant"
            raise HttpError(409, "another_request", f"{HEADER} belongs to another request; {reason}", HEADER)
        if not secrets.compare_digest(mac, self._mac(said)):
            raise invalid(f"{HEADER} was not signed by this server, or by one with the same --resume-secret", HEADER)
        output, num_new, num_events, num_sent, *num_tokens = _decode(said[_FIXED.size :])
        assert len(num_tokens) == num_outputs
        position = Position(tuple(num_tokens), output, num_new, num_events, num_sent, checksum)
        return Origin(nonce, created), position

    def _mac(self, said: bytes) -> bytes:
        mac = self._signer.copy()
        mac.update(said)
        return mac.digest()


def _encode(numbers: Iterable[int]) -> bytes:
    """Numbers in LEB128: seven bits a byte, the lowest first."""
    data = bytearray()
    for number in numbers:
        while number > 0x7F:
            data.append(number & 0x7F | 0x80)
            number >>= 7
        data.append(number)
    return bytes(data)


def _decode(data: bytes) -> list[int]:
    numbers, number, shift = list[int](), 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    return numbers
