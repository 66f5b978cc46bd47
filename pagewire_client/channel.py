"""Opens channels for clients and authenticates calls."""

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import grpc

from pagewire_common.connection.channel import is_socket, open_channel, split_target
from pagewire_common.connection.misdirected import Direction
from pagewire_common.connection.tls import TlsFolder
from pagewire_common.start_error import StartError

log = logging.getLogger("pagewire_client")

SILENT_SECONDS = 2.0
"""Seconds of a connection attempt after which the user is told of it."""
CLIENTS_PORT = "clients call the scheduler's --listen, port 50051 by default"
OPERATORS_PORT = "operators' commands call the scheduler's --admin-listen, port 50053 by default"
OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 << 20),
    # A restarted server, perhaps at another address, is found within two seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # time limit of one attempt
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)

_RESOLVERS = ("dns", "ipv4", "ipv6")
"""Schemes of gRPC's own name resolvers."""

Metadata = Sequence[tuple[str, str]] | None


def direction(target: str, tls: Path | None, port_hint: str) -> Direction:
    """How `connect` reaches the server, for advice about failed calls."""
    return Direction(target, tls is not None, "--tls", port_hint, may_use_proxy=True)


def connect(target: str, tls: Path | None = None) -> grpc.aio.Channel:
    """Open a channel. `tls` is a folder of certificates; without `tls` the channel uses plain text.

    The server is checked against ca.crt, or the system's authorities without ca.crt. tls.crt and tls.key are the
    client's certificate. Raises ValueError for invalid certificates, targets or proxies.
    """
    _check_target(target)
    if tls is None:
        return open_channel(target, None, OPTIONS, may_use_proxy=True)
    try:
        credentials = TlsFolder(tls).channel_credentials()
    except StartError as error:
        raise ValueError(str(error)) from None
    return open_channel(target, credentials, OPTIONS, may_use_proxy=True)


async def say_if_silent(channel: grpc.aio.Channel, target: str, retry_for: float = 0.0) -> None:
    """Connect, and log a line if nothing answers for SILENT_SECONDS. A refused connection has an error of its own."""
    channel.get_state(try_to_connect=True)
    await asyncio.sleep(SILENT_SECONDS)
    if channel.get_state() is grpc.ChannelConnectivity.CONNECTING:
        limit = f"; trying for {retry_for:g} s" if 0 < retry_for < math.inf else ""
        log.info("%s does not answer yet%s", target, limit)


def _check_target(target: str) -> None:
    if target.startswith(("http://", "https://")):
        raise ValueError(f"the target {target!r} is a URL; give it as HOST:PORT, such as localhost:50051")
    if "://" in target or is_socket(target):
        return
    scheme, colon, rest = target.partition(":")
    address = rest if colon and scheme in _RESOLVERS else target
    port = split_target(address)[1]
    if port is None:
        example = f"{address or 'localhost'}:50051"
        raise ValueError(f"the target {target!r} has no port; give it as HOST:PORT, such as {example}")
    if not 0 < port < 1 << 16:
        raise ValueError(f"the port of the target {target!r} must be in [1, 65535]")


def key_metadata(api_key: str) -> Metadata:
    """Raises ValueError for an invalid key."""
    if not (api_key.isascii() and (api_key.isprintable() or not api_key)):
        raise ValueError("an API key has printable ASCII characters only")
    return (("authorization", f"Bearer {api_key}"),) if api_key else None
