"""Explains why a server cannot listen on an address, and how to correct the setting."""

import errno
import socket

from pagewire_common.start_error import StartError


def cannot_listen(listen: str, setting: str) -> StartError:
    """The error for an address that cannot be used. `setting`: the name of its setting."""
    host, _, port = listen.rpartition(":")
    try:
        reason = _reason(host.strip("[]"), int(port))
    except (socket.gaierror, UnicodeError):
        reason = f"{host} cannot be resolved; give {setting} an address of this machine"
    else:
        reason = reason.format(host=host, port=port, setting=setting)
    return StartError(f"{setting}: cannot listen on {listen}: {reason}")


def _reason(host: str, port: int) -> str:
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen()
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    return "{host} is not an address of this machine; 0.0.0.0 means all addresses of it"
                if error.errno == errno.EACCES:
                    return "this user may not listen on port {port}; give {setting} a port of 1024 or more"
    return "port {port} is in use by another process; end that one, or give {setting} another port"
