"""Limits of the HTTP server for untrusted clients."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes, times and connections.

    `most_bytes` limits a body, and `most_sound_bytes` a body with a sound. `max_connections` includes connections in
    their TLS handshake. `receive_seconds` limits the time until a request's head is complete, counted from the
    connection's start or the previous answer. The body then has as long again.
    """

    most_bytes: int = 1 << 20
    most_sound_bytes: int = 1 << 20
    max_connections: int = 4096
    receive_seconds: float = 60.0
