"""Reserves a TCP port that one service's processes share and no other service can use.

One race remains: two services that bind it within a fraction of a millisecond, one of them at all addresses.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

from pagewire_common.serving.listening import cannot_listen

PATIENCE_SECONDS = 2.0
"""Seconds to wait for a port; a killed scheduler's front ends listen for milliseconds more."""
LOOK_SECONDS = 0.05
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104


@contextlib.contextmanager
def reserved(listen: str, patience: float = 0.0, setting: str = "--listen") -> Iterator[str]:
    """Reserve a port for this user's sockets during the `with` block. Yields HOST:PORT with the number of the reserved
    port.

    The reserving sockets do not listen, and so receive no connections. The port is reserved at every address that gRPC
    will bind for this host. Raises StartError if the port is still in use after `patience` seconds; its text
    names the `setting`.
    """
    host, _, number = listen.rpartition(":")
    deadline = time.monotonic() + patience
    while True:
        try:
            stack, port = _taken(host, int(number))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise cannot_listen(listen, setting) from error
        time.sleep(LOOK_SECONDS)
    with stack:
        yield f"{host}:{port}"


def _taken(host: str, port: int) -> tuple[contextlib.ExitStack, int]:
    """The sockets that reserve the port, and its number. Raises OSError if the port is in use."""
    with contextlib.ExitStack() as stack:
        for family, address in _addresses(host.strip("[]")):
            with _bound(family, address, port) as alone:  # fails while another server listens at this port
                port = alone.getsockname()[1]
                stack.enter_context(_claimed(f"{address}:{port}"))
            stack.enter_context(_held(family, address, port))
        return stack.pop_all(), port


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Addresses that gRPC binds: all of a host name, or both wildcards for either."""
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
    """A socket that shares the port with front ends, and excludes other services at once, or, if an earlier server's
    connections linger, once a front end listens.
    """
    try:
        return _bound(family, address, port, shares=True, lingers=False)
    except OSError:
        return _bound(family, address, port, shares=True)


def _bound(
    family: socket.AddressFamily, address: str, port: int, *, shares: bool = False, lingers: bool = True
) -> socket.socket:
    """Raises OSError if the port is in use.

    `shares`: other sockets of this user may bind the port. `lingers`: the port may have lingering connections; two such
    sockets can bind one port until one listens.
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
    """Claim an address by an abstract socket (Linux): sockets that share a port do not exclude each other. Raises
    OSError.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0pagewire {address}")
    except OSError:
        claim.close()
        raise
    return claim
