"""Limits of the HTTP server for untrusted clients."""

from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from scheduler_service.access.keys import ApiKey
from scheduler_service.frontend.http.errors import HttpError

HELD_BYTES = 256 << 20
"""Bytes of memory for the bodies and whole answers of all HTTP requests of a front end. An audio file may count up to
three times, once for each copy.
"""
MAX_ITEM_BYTES = 8 << 20
"""Bytes of the prompt_embeds or the images of a body, before they are encoded as base64."""
MAX_SOUND_FORM_BYTES = 1 << 20
"""Bytes of a form with an audio file, in addition to the file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`receive_seconds`: time for a request's head, from the connection or the previous answer, and for its body.
    `max_connections` includes connections in their TLS handshake.
    """

    max_connections: int = 4096
    receive_seconds: float = 60.0


class Room:
    """Memory limit in bytes for all requests and answers of this process.

    A client may hold as much as it leaves free: half of the memory if it is alone, a third beside another such client.
    So part of the memory is always free for the small requests of further clients.
    """

    def __init__(self, num_bytes: int = HELD_BYTES) -> None:
        self.num_free = num_bytes
        self._held: Counter[str] = Counter()  # bytes by client

    def take(self, client: str, num_bytes: int) -> None:
        """Raises HttpError if the client would hold more than it leaves free."""
        if self._held[client] + num_bytes > self.num_free - num_bytes:
            raise HttpError(503, "overloaded", "too many large requests are under way; try again later")
        self.num_free -= num_bytes
        self._held[client] += num_bytes

    def give_back(self, client: str, num_bytes: int) -> None:
        self.num_free += num_bytes
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]


@dataclass(slots=True)
class Held:
    """The memory that one HTTP request of a client has reserved, until the `with` block ends."""

    room: Room
    client: str = ""
    _num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Reserve memory for the request. Raises HttpError if its client holds too much."""
        self.room.take(self.client, num_bytes)
        self._num_bytes += num_bytes

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_: object) -> None:
        self.room.give_back(self.client, self._num_bytes)
        self._num_bytes = 0


def client_of(key: ApiKey | None, address: str) -> str:
    """The client whose memory is limited: the API key, or else the address. An IPv6 address counts by its /64 network,
    which belongs to one customer.
    """
    if key is not None:
        return f"key {key.id}"
    try:
        parsed = ip_address(address)
    except ValueError:  # a Unix socket has no address
        return address
    if parsed.version == 4:
        return address
    return str(parsed.ipv4_mapped or ip_network((int(parsed) >> 64 << 64, 64)))
