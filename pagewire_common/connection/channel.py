"""Opens channels, and decides whether a call uses the HTTP proxy of the environment.

Calls between pagewire's services never use the proxy; pagewire's client uses it unless the server is on this machine.
"""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit
from urllib.request import BaseHandler, OpenerDirector, ProxyHandler, build_opener

import grpc

DIRECT = (("grpc.enable_http_proxy", 0),)
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that may contain the proxy's URL, in gRPC's order. The first that is set is used, also for plain text."""
EXCEPTION_VARIABLES = ("no_grpc_proxy", "no_proxy")


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, int | str]] = (),
    *,
    may_use_proxy: bool = False,
) -> grpc.aio.Channel:
    """Without `credentials`, the channel uses plain text."""
    route = () if may_use_proxy and proxy_of(target) else DIRECT
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=[*options, *route])
    return grpc.aio.secure_channel(target, credentials, options=[*options, *route])


def direct_opener(*handlers: BaseHandler) -> OpenerDirector:
    """Create an opener of URLs without the proxy of urllib's default, for services on this machine."""
    return build_opener(ProxyHandler({}), *handlers)


def proxy_of(target: str, environment: Mapping[str, str] | None = None) -> str:
    """HOST:PORT of the proxy for a client's calls to `target`; empty for direct calls.

    Raises ValueError for a variable that is not a URL, without its value, which may contain a password.
    """
    if is_local(target):
        return ""
    environment = os.environ if environment is None else environment
    variable = next((name for name in PROXY_VARIABLES if name in environment), "")
    exceptions = next((environment[name] for name in EXCEPTION_VARIABLES if name in environment), "")
    host = split_target(target)[0].lower()
    if not variable or any(_matches(host, entry.strip().lower()) for entry in exceptions.split(",")):
        return ""
    return _http_address(variable, environment[variable])


def _http_address(variable: str, url: str) -> str:
    """HOST:PORT in a proxy's URL; empty for a scheme other than http, which gRPC ignores."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "http":
            return ""
        if parts.hostname and parts.port != 0 and "@" not in parts.path + parts.query + parts.fragment:
            return parts.netloc.rpartition("@")[2]  # only the part before the last @ can contain a password
    except ValueError:
        pass
    raise ValueError(
        f"{variable} in the environment is not http://HOST:PORT or http://USER:PASSWORD@HOST:PORT; "
        "of a password / ? # [ ] @ are written %2F %3F %23 %5B %5D %40"
    )


def _matches(host: str, exception: str) -> bool:
    """Whether an entry of no_proxy (a name's end, a network, or "*") matches a host, by gRPC's rules."""
    if not exception:
        return False
    if exception == "*" or host.endswith(exception.removeprefix(".")):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(exception, strict=False)
    except ValueError:
        return False


def split_target(target: str) -> tuple[str, int | None]:
    """Host and port of HOST:PORT, or of gRPC's longer form dns://[SERVER]/HOST:PORT. The port may be None."""
    address = target.rpartition("/")[2]
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and not (":" in host and not host.endswith("]")):
        return host.strip("[]"), int(port)
    return address.strip("[]"), None


def is_socket(target: str) -> bool:
    return target.startswith(("unix:", "unix-abstract:"))


def is_local(target: str) -> bool:
    if is_socket(target):
        return True
    host, _ = split_target(target)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
