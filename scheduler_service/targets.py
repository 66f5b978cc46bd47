"""The syntax of --workers: fixed addresses, and DNS names whose addresses are all workers."""

from pagewire_common.connection.address import parse_address

SCHEME = "dns:///"


def parse_target(target: str) -> str:
    """Raises ValueError unless the target is HOST:PORT or dns:///NAME:PORT."""
    address = target.removeprefix(SCHEME)
    try:
        parse_address(address)
    except ValueError:
        address = ""
    if not address or "/" in address:
        raise ValueError(f"'{target}' is neither HOST:PORT nor {SCHEME}NAME:PORT")
    return target


def is_name(target: str) -> bool:
    return target.startswith(SCHEME)
