"""Certificates of an authority that is made on the spot, in folders as cert-manager fills them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


def fill(
    folder: Path, authority: trustme.CA, *names: str, trusts: trustme.CA | None = None, is_expired: bool = False
) -> Path:
    """A certificate for these names, and the authority that the other side's must come from: its own unless told."""
    folder.mkdir(parents=True, exist_ok=True)
    until = datetime.now(UTC) - timedelta(hours=1) if is_expired else None
    issued = authority.issue_cert(*names, not_after=until)
    issued.private_key_pem.write_to_path(str(folder / "tls.key"))
    (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (trusts or authority).cert_pem.write_to_path(str(folder / "ca.crt"))
    return folder
