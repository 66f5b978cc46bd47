"""What strangers may take of the process that serves HTTP."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bodies have at most `most_bytes`, or `most_sound_bytes` with a sound.

    Of `max_connections` those count too whose TLS handshake is under way. The head of a request must have come
    `receive_seconds` after its connection was opened, or after the answer before it, and its body as many after that.
    """

    most_bytes: int = 1 << 20
    most_sound_bytes: int = 1 << 20
    max_connections: int = 4096
    receive_seconds: float = 60.0
