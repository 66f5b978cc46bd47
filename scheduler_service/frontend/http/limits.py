"""Limits of the HTTP server for untrusted clients."""

from dataclasses import dataclass

from scheduler_service.frontend.http.errors import HttpError

HELD_BYTES = 256 << 20
"""Bytes of memory for the bodies and whole answers of all HTTP requests of a front end. An audio file may count up to
three times, once for each copy.
"""
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
    """Memory limit in bytes for all requests and answers of this process, summed over all clients."""

    def __init__(self, num_bytes: int = HELD_BYTES) -> None:
        self.num_free = num_bytes


@dataclass(slots=True)
class Held:
    """The memory that one HTTP request has reserved, until the `with` block ends."""

    room: Room
    _num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Reserve memory for the request. Raises HttpError if less than `num_bytes` of the limit is free."""
        if num_bytes > self.room.num_free:
            raise HttpError(503, "overloaded", "too many large requests are under way; try again later")
        self.room.num_free -= num_bytes
        self._num_bytes += num_bytes

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_: object) -> None:
        self.room.num_free += self._num_bytes
        self._num_bytes = 0
