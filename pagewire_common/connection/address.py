"""HOST:PORT, the address that a server listens on."""


def parse_address(address: str) -> str:
    """Check that an address is HOST:PORT; raises ValueError otherwise. Port 0 lets the system choose."""
    split_address(address)
    return address


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises ValueError if the text is not HOST:PORT. An IPv6 address keeps its brackets."""
    host, separator, port = address.rpartition(":")
    if not (host and separator and port.isdigit() and int(port) < 65536):
        raise ValueError(f"'{address}' is not HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
