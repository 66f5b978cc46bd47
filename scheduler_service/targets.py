"""The syntax of --workers: fixed addresses, and DNS names. Every address to which a DNS name resolves is the address of
a worker.
"""

from pagewire_common.connection.address import parse_address

SCHEME = "dns:///"


def parse_target(target: str) -> str:
    """Check that a target is HOST:PORT or dns:///NAME:PORT, and return it. Raises ValueError for a text of another
    form.
    """
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
