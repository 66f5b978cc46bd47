"""Resolves the names of hosts to public addresses: nothing in the server's own network may be reached by a URL."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Lookup = Callable[[str], Awaitable[list[str]]]
"""Returns the addresses of a host, as texts. Raises OSError."""
MAX_LOOKUPS = 32
"""Names of hosts that are looked up at the same time."""
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""Addresses whose last 32 bits are an IPv4 address that a gateway connects to (RFC 6052)."""

_THREADS = ThreadPoolExecutor(MAX_LOOKUPS, "names")
"""Apart from the event loop's threads: a name server that does not answer would hold all of them for many seconds."""


async def look_up(host: str) -> list[str]:
    ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_THREADS, ask)
    return [str(address[0]) for *_, address in found]


def is_public(text: str) -> bool:
    """Whether an address belongs to a host of the internet."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return _is_global(address) if isinstance(address, IPv4Address) else _is_global_v6(address)


def _is_global_v6(address: IPv6Address) -> bool:
    if address.ipv4_mapped is not None:
        return _is_global(address.ipv4_mapped)
    if address in _TRANSLATED:
        return _is_global(IPv4Address(int(address) & 0xFFFF_FFFF))
    # 6to4 and Teredo contain IPv4 addresses of gateways; site-local addresses are the older private ones.
    is_special = address.sixtofour is not None or address.teredo is not None or address.is_site_local
    return not is_special and _is_global(address)


def _is_global(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
