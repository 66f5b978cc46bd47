"""Opens channels, and decides whether a call uses the HTTP proxy of the environment.

By default gRPC sends every call to the proxy, including calls to this machine and to workers. In pagewire, calls
between the services never use a proxy. Calls of pagewire's client use the proxy unless the server is on this machine.
"""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit
from urllib.request import BaseHandler, OpenerDirector, ProxyHandler, build_opener

import grpc

DIRECT = (("grpc.enable_http_proxy", 0),)
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Environment variables that may contain the proxy's URL, in gRPC's order. The first variable that is set is used, for
TLS and for plain text.
"""
EXCEPTION_VARIABLES = ("no_grpc_proxy", "no_proxy")


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, int | str]] = (),
    *,
    may_use_proxy: bool = False,
) -> grpc.aio.Channel:
    """Open a channel to `target`. Without `credentials` the channel uses plain text."""
    route = () if may_use_proxy and proxy_of(target) else DIRECT
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=[*options, *route])
    return grpc.aio.secure_channel(target, credentials, options=[*options, *route])


def direct_opener(*handlers: BaseHandler) -> OpenerDirector:
    """Create an opener of URLs without a proxy, for services on this machine. urllib's default opener would use the
    proxy.
    """
    return build_opener(ProxyHandler({}), *handlers)


def proxy_of(target: str, environment: Mapping[str, str] | None = None) -> str:
    """The HOST:PORT of the proxy for a client's calls to `target`. The result is empty if the calls go to the target
    directly.

    Raises ValueError for a variable that is not a URL. The error does not quote the variable's value, because the value
    may contain a password.
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
    """The HOST:PORT in a proxy's URL. The result is empty if the scheme is not http: gRPC uses only http proxies."""
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
    """Whether an entry of no_proxy matches a host, by gRPC's rules.

    An entry of no_proxy is the end of a host's name, or a network. The entry "*" matches every host, as in curl.
    """
    if not exception:
        return False
    if exception == "*" or host.endswith(exception.removeprefix(".")):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(exception, strict=False)
    except ValueError:
        return False


def split_target(target: str) -> tuple[str, int | None]:
    """The host and the port of a target. The target is HOST:PORT or gRPC's longer form dns://[SERVER]/HOST:PORT. The
    port is None if the target has no port.
    """
    address = target.rpartition("/")[2]
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and not (":" in host and not host.endswith("]")):
        return host.strip("[]"), int(port)
    return address.strip("[]"), None


def is_socket(target: str) -> bool:
    return target.startswith(("unix:", "unix-abstract:"))


def is_local(target: str) -> bool:
    """Whether the target is certainly on this machine."""
    if is_socket(target):
        return True
    host, _ = split_target(target)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
