"""Finds workers: fixed addresses, and names looked up repeatedly, which have an address for each container or pod."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from scheduler_service.targets import SCHEME

log = structlog.get_logger()

_NO_ADDRESS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""All addresses (HOST:PORT) of a name and a port. Raises OSError if the look-up fails."""


async def resolve_by_dns(name: str, port: int) -> frozenset[str]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return frozenset()
        raise
    return frozenset(
        f"[{address[0]}]:{port}" if family is socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    )


async def watch_name(target: str, resolve: Resolve, interval: float) -> AsyncIterator[frozenset[str]]:
    """Yield the addresses of dns:///NAME:PORT at each change. A failed look-up changes nothing: resolvers have outages
    too.
    """
    name, _, port = target.removeprefix(SCHEME).rpartition(":")
    known: frozenset[str] | None = None
    reason = ""
    while True:
        try:
            found = await resolve(name.strip("[]"), int(port))
        except (OSError, UnicodeError) as error:  # the resolver is unreachable, or the name is invalid
            if str(error) != reason:
                reason = str(error)
                log.warning("workers' name cannot be looked up", name=name, reason=reason)
        else:
            reason = ""
            if found != known:
                log.info("workers found", name=name, addresses=sorted(found))
                known = found
                yield found
        await asyncio.sleep(interval)
