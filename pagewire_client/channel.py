"""Opens channels for clients and authenticates calls."""

from collections.abc import Sequence
from pathlib import Path

import grpc

from pagewire_common.connection.channel import is_socket, open_channel, split_target
from pagewire_common.connection.misdirected import Direction
from pagewire_common.connection.tls import TlsFolder
from pagewire_common.start_error import StartError

CLIENTS_PORT = "clients call the scheduler's --listen, which has port 50051 unless told otherwise"
OPERATORS_PORT = "operators' commands call the scheduler's --admin-listen, which has port 50053 unless told otherwise"
OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 << 20),
    # After a restart of a server, clients find the server within two seconds. The server's name may resolve to another
    # address after the restart.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # time limit of one attempt to connect, in milliseconds
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)

_RESOLVERS = ("dns", "ipv4", "ipv6")
"""Schemes of gRPC's own name resolvers."""

Metadata = Sequence[tuple[str, str]] | None


def direction(target: str, tls: Path | None, port_hint: str) -> Direction:
    """How the channel of `connect` reaches the server. Advice about a failed call quotes these properties of the
    connection.
    """
    return Direction(target, tls is not None, "--tls", port_hint, may_use_proxy=True)


def connect(target: str, tls: Path | None = None) -> grpc.aio.Channel:
    """Open a channel. `tls` is a folder of certificates; without `tls` the channel uses plain text.

    The server's certificate is checked against the folder's ca.crt. If ca.crt is missing, the system's authorities are
    used. tls.crt and tls.key are sent to servers that ask for a client certificate. Raises ValueError if the
    certificates, the target or the proxy are invalid.
    """
    _check_target(target)
    if tls is None:
        return open_channel(target, None, OPTIONS, may_use_proxy=True)
    try:
        credentials = TlsFolder(tls).channel_credentials()
    except StartError as error:
        raise ValueError(str(error)) from None
    return open_channel(target, credentials, OPTIONS, may_use_proxy=True)


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
    """The metadata with which a call sends an API key. The metadata is empty without a key. Raises ValueError for an
    invalid key.
    """
    if not (api_key.isascii() and (api_key.isprintable() or not api_key)):
        raise ValueError("an API key has printable ASCII characters only")
    return (("authorization", f"Bearer {api_key}"),) if api_key else None
