"""Certificates of a new authority, in folders as cert-manager fills them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


def fill(
    folder: Path, authority: trustme.CA, *names: str, trusts: trustme.CA | None = None, is_expired: bool = False
) -> Path:
    """A certificate for these names, and in `ca.crt` the authority of the other side's, by default the same."""
    folder.mkdir(parents=True, exist_ok=True)
    until = datetime.now(UTC) - timedelta(hours=1) if is_expired else None
    issued = authority.issue_cert(*names, not_after=until)
    issued.private_key_pem.write_to_path(str(folder / "tls.key"))
    (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (trusts or authority).cert_pem.write_to_path(str(folder / "ca.crt"))
    return folder


def strangers(folder: Path, authority: trustme.CA) -> list[Path]:
    """Folders of clients that fail under mutual TLS: expired, of another authority, trusting another, and without a
    certificate.
    """
    other = trustme.CA()
    none = fill(folder / "none", authority, "client")
    (none / "tls.crt").unlink()
    (none / "tls.key").unlink()
    return [
        fill(folder / "expired", authority, "client", is_expired=True),
        fill(folder / "other", other, "client", trusts=authority),
        fill(folder / "untrusting", authority, "client", trusts=other),
        none,
    ]
