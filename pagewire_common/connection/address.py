"""Parses HOST:PORT, the address on which a server listens."""


def parse_address(address: str) -> str:
    """Check that an address is HOST:PORT; with port 0, the system chooses the port. Raises ValueError."""
    split_address(address)
    return address


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT. An IPv6 address keeps its brackets. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not (host and separator and port.isdigit() and int(port) < 65536):
        raise ValueError(f"'{address}' is not HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Join host and port. An IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
