"""Reserves a TCP port that the processes of one service share, and that no other service can use.

One race remains: two services may bind the same port if they start within a fraction of a millisecond, the first at one
address and the second at all addresses.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

from pagewire_common.serving.listening import cannot_listen

PATIENCE_SECONDS = 2.0
"""Seconds to wait for a port that is in use. The front ends of a killed scheduler listen for some milliseconds more."""
LOOK_SECONDS = 0.05
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104


@contextlib.contextmanager
def reserved(listen: str, patience: float = 0.0) -> Iterator[str]:
    """Reserve a port for this user's sockets during the `with` block. Yields HOST:PORT with the number of the reserved
    port.

    The reserving sockets do not listen, and so receive no connections. The port is reserved at every address that gRPC
    will bind for this host. Raises StartError if the port is still in use after `patience` seconds.
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
    """Reserve the port. Returns the reserving sockets and the port's number. Raises OSError if the port is in use."""
    with contextlib.ExitStack() as stack:
        for family, address in _addresses(host.strip("[]")):
            with _bound(family, address, port) as alone:  # fails while another server listens at this port
                port = alone.getsockname()[1]
                stack.enter_context(_claimed(f"{address}:{port}"))
            stack.enter_context(_held(family, address, port))
        return stack.pop_all(), port


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses that gRPC binds for a host. For a host name, gRPC binds all its addresses.

    For a wildcard address of IPv4 or IPv6, gRPC binds both wildcard addresses.
    """
    hosts = WILDCARDS if host in WILDCARDS else (host,)
    found = [info for name in hosts for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    usable = {family: _has_family(family) for family, *_ in found}
    return list(dict.fromkeys((family, str(address[0])) for family, *_, address in found if usable[family]))


def _has_family(family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
    except OSError:  # for example in a container without IPv6
        return False
    return True


def _held(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """A socket that shares the port with front ends, and excludes other services even before a front end listens.

    In one case other services are excluded only when a front end listens: if an earlier server did not share the port,
    and its connections linger.
    """
    try:
        return _bound(family, address, port, shares=True, lingers=False)
    except OSError:
        return _bound(family, address, port, shares=True)


def _bound(
    family: socket.AddressFamily, address: str, port: int, *, shares: bool = False, lingers: bool = True
) -> socket.socket:
    """A socket bound to the port. Raises OSError if the port is in use.

    With `shares` further sockets of the same user may bind the port. With `lingers` the port can be bound although
    connections of an earlier server linger. Two sockets with `lingers` can both bind the port until one of them
    listens.
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
    """Claim an address by binding an abstract socket with the address as its name (Linux only). Only one process at a
    time can bind such a name.

    The claim is needed because sockets that share a port do not exclude each other. Raises OSError if another process
    has claimed the address.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0pagewire {address}")
    except OSError:
        claim.close()
        raise
    return claim
