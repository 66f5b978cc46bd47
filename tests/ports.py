"""Ports of processes that are restarted at their address."""

import random
import socket

_taken: set[int] = set()
_ports = random.SystemRandom()  # a seed would have every process of tests try the same ones


def free_port(host: str = "127.0.0.1") -> int:
    """A port that no outgoing connection takes while its process is down, not even that of its client."""
    while True:
        port = _ports.randrange(20_000, 32_000)  # below Linux's range for outgoing connections
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        if port not in _taken:
            _taken.add(port)
            return port


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"
