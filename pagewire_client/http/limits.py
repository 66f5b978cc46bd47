"""Limits of the HTTP server for untrusted clients."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of sizes, times and connections.

    `most_bytes` limits a body, and `most_sound_bytes` a body with a sound. `max_connections` includes connections in
    their TLS handshake. `receive_seconds` limits the time until a request's headers are complete. The time for the
    headers begins with the connection or after the previous answer. The body has a further `receive_seconds`.
    """

    most_bytes: int = 1 << 20
    most_sound_bytes: int = 1 << 20
    max_connections: int = 4096
    receive_seconds: float = 60.0
