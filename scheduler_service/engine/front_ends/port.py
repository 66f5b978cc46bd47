"""A port shared by the processes of one service: reserved once for all of them, and refused to any other service.

One race remains: two services that start within the same fraction of a millisecond, one at an address and one at all
addresses, may both get it.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

from pagewire_common.serving.listening import cannot_listen

PATIENCE_SECONDS = 2.0
"""Seconds to wait for a port. Front ends of a killed scheduler end some milliseconds after it, and listen until
then.
"""
LOOK_SECONDS = 0.05
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104


@contextlib.contextmanager
def reserved(listen: str, patience: float = 0.0) -> Iterator[str]:
    """Reserve a port for this user's sockets within the `with` block; yields HOST:PORT with the port's number.

    Nothing listens on the reserving sockets, so they get no connections. The port is reserved at every address that
    gRPC will bind for this host. Raises StartError if it cannot be reserved within `patience` seconds, or another
    server has it.
    """
    host, _, number = listen.rpartition(":")
    deadline = time.monotonic() + patience
    while True:
        try:
            stack, port = _taken(host, int(number))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise cannot_listen(listen, "--listen") from error
        time.sleep(LOOK_SECONDS)
    with stack:
        yield f"{host}:{port}"


def _taken(host: str, port: int) -> tuple[contextlib.ExitStack, int]:
    """The sockets that hold the port, and the port's number. Raises OSError."""
    with contextlib.ExitStack() as stack:
        for family, address in _addresses(host.strip("[]")):
            with _bound(family, address, port) as alone:  # fails while another server listens
                port = alone.getsockname()[1]
                stack.enter_context(_claimed(f"{address}:{port}"))
            stack.enter_context(_held(family, address, port))
        return stack.pop_all(), port


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses that gRPC binds for a host: all addresses of a name, and both families for either wildcard."""
    hosts = WILDCARDS if host in WILDCARDS else (host,)
    found = [info for name in hosts for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    usable = {family: _has_family(family) for family, *_ in found}
    return list(dict.fromkeys((family, str(address[0])) for family, *_, address in found if usable[family]))


def _has_family(family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
    except OSError:  # e.g. IPv6 in many containers
        return False
    return True


def _held(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """A socket that shares the port with front ends, but with no other service, even before any of them listens.

    If connections linger of a server that did not share the port, another service is refused only once front ends
    listen.
    """
    try:
        return _bound(family, address, port, shares=True, lingers=False)
    except OSError:
        return _bound(family, address, port, shares=True)


def _bound(
    family: socket.AddressFamily, address: str, port: int, *, shares: bool = False, lingers: bool = True
) -> socket.socket:
    """A socket that may share the port, also while a former server's connections linger.

    Two sockets of the latter kind can both be bound, as long as neither listens.
    """
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, lingers)
        if shares:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def _claimed(address: str) -> socket.socket:
    """A name that one process can hold at a time, until it ends: sockets that share a port do not exclude each
    other.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0pagewire {address}")
    except OSError:
        claim.close()
        raise
    return claim
