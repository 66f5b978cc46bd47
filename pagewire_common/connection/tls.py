"""TLS from a folder with cert-manager's file names. ca.crt verifies the other side's certificates.

A server looks for changed files at each new connection. New files are used when they have not changed for
SETTLE_SECONDS, all previous files still exist, and certificate and key match.
"""

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import structlog

from pagewire_common.connection.channel import open_channel
from pagewire_common.start_error import StartError

log = structlog.get_logger()

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
SETTLE_SECONDS = 1.0
"""Seconds without a change, after which files count as complete: half a list of authorities would be valid."""


class _Files(NamedTuple):
    certificate: bytes | None
    key: bytes | None
    authority: bytes | None

    @property
    def names(self) -> set[str]:
        return {name for name, data in zip((CERTIFICATE, KEY, AUTHORITY), self, strict=True) if data is not None}

    @property
    def pairs(self) -> list[tuple[bytes, bytes]]:
        return [] if self.certificate is None or self.key is None else [(self.key, self.certificate)]


class TlsFolder:
    """The TLS folder of a server or a client, for any thread. Raises StartError if files are missing or invalid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stamp = self._look()  # the state on disk of the files in use
        try:
            self._files = self._read()
        except (OSError, ValueError) as error:
            raise StartError(f"cannot use the certificates in {folder}: {error}") from None
        self._generation = 0  # number of times that changed files were loaded
        # The files' state at the last look, and the time at which it was first seen.
        self._seen, self._seen_at = self._stamp, 0.0

    def _look(self) -> tuple[object, ...]:
        """A value that changes if the files or the permissions to read them change."""
        stamps: list[object] = []
        for name in (CERTIFICATE, KEY, AUTHORITY):
            try:
                status = (self._folder / name).stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
        return tuple(stamps)

    def _read(self) -> _Files:
        """Raises OSError (as ssl's errors are) or ValueError if the files cannot be used."""
        paths = [self._folder / name for name in (CERTIFICATE, KEY, AUTHORITY)]
        files = _Files(*(path.read_bytes() if path.exists() else None for path in paths))
        if not files.names:
            raise ValueError(f"it has neither {CERTIFICATE} and {KEY} nor {AUTHORITY}")
        if (files.certificate is None) != (files.key is None):
            missing = CERTIFICATE if files.certificate is None else KEY
            raise ValueError(f"it has no {missing}; {CERTIFICATE} and {KEY} belong together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if files.certificate is not None:
            with _named(f"{CERTIFICATE} and {KEY}"):
                context.load_cert_chain(paths[0], paths[1], _no_password)
        if files.authority is not None:
            with _named(AUTHORITY):
                context.load_verify_locations(paths[2])
        return files

    def refresh(self) -> int:
        """Load changed files, if they can be used. Returns their generation, which grows with each change."""
        with self._lock:
            stamp, now = self._look(), time.monotonic()
            if stamp != self._seen:
                self._seen, self._seen_at = stamp, now
            if self._seen_at and (now - self._seen_at >= SETTLE_SECONDS or self._is_old()):
                self._seen_at = 0.0  # 0 means "checked": each change of the files is checked and logged once
                if stamp != self._stamp:
                    self._take(stamp)
            return self._generation

    def _is_old(self) -> bool:
        """Whether folder and files have not changed for SETTLE_SECONDS: they are then complete at the first look."""
        paths = (self._folder, *(self._folder / name for name in (CERTIFICATE, KEY, AUTHORITY)))
        try:
            return time.time() - max(path.stat().st_ctime for path in paths if path.exists()) >= SETTLE_SECONDS
        except (OSError, ValueError):
            return False

    def _take(self, stamp: tuple[object, ...]) -> None:
        try:
            files = self._read()
            if missing := sorted(self._files.names - files.names):
                raise ValueError(
                    f"{' and '.join(missing)} is missing; only after a restart does the server run without it"
                )
        except (OSError, ValueError) as error:
            if self._look() == stamp:
                reason, folder = str(error), str(self._folder)
                log.error("changed certificates cannot be used; the old ones stay", folder=folder, reason=reason)
            return
        if self._look() == stamp:  # otherwise the files were replaced while they were read
            self._stamp, self._files = stamp, files
            self._generation += 1
            log.info("certificates read again", folder=str(self._folder))

    def _need_own(self, *, mutual: bool) -> None:
        if not self._files.pairs:
            raise StartError(f"a server needs {CERTIFICATE} and {KEY}, which {self._folder} has not")
        if mutual and self._files.authority is None:
            raise StartError(f"clients' certificates are checked with {AUTHORITY}, which {self._folder} has not")

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Credentials of a gRPC server. With `mutual`, clients must present a certificate. Raises StartError."""
        self._need_own(mutual=mutual)
        loaded = self.refresh()

        def configuration() -> Any:
            return grpc.ssl_server_certificate_configuration(self._files.pairs, self._files.authority)

        def if_changed() -> Any:  # called at each handshake, on gRPC's own thread
            nonlocal loaded
            if (generation := self.refresh()) == loaded:
                return None
            loaded = generation
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), if_changed, mutual)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC client, from the current files. Without ca.crt, the system's authorities are used."""
        self.refresh()
        key, certificate = self._files.pairs[0] if self._files.pairs else (None, None)
        return grpc.ssl_channel_credentials(self._files.authority, key, certificate)

    def client_context(self) -> ssl.SSLContext:
        """The TLS context of an HTTP client. Raises OSError while files are being replaced."""
        has_authority = self._files.authority is not None
        context = ssl.create_default_context(cafile=self._folder / AUTHORITY if has_authority else None)
        if self._files.pairs:
            context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY, _no_password)
        self._check_unchanged()
        return context

    def _check_unchanged(self) -> None:
        """Raise OSError if the files on disk differ from the files in use, which alone were checked."""
        if self._look() != self._stamp:
            raise OSError(f"the files in {self._folder} are being replaced")

    def server_context(self, *, mutual: bool) -> ssl.SSLContext:
        """The TLS context of an HTTP server. Raises StartError, or OSError while files are being replaced."""
        self._need_own(mutual=mutual)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY, _no_password)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._folder / AUTHORITY)
        self._check_unchanged()
        return context


@contextlib.contextmanager
def _named(files: str) -> Iterator[None]:
    """Add the files' names to ssl's errors. Raises ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{files} cannot be read as PEM: {getattr(error, 'strerror', None) or error}") from None


def _no_password() -> str:
    """ssl would otherwise ask for an encrypted key's password at the terminal, and wait."""
    raise OSError("the key is encrypted; it must not be")


class Security(NamedTuple):
    """The conditions under which a server accepts a connection.

    With `mutual`, clients need a certificate, which must contain the name `identity`, unless empty.
    """

    tls: TlsFolder | None = None
    mutual: bool = False
    identity: str = ""


OPEN = Security()


def secure_channel(
    target: str,
    tls: TlsFolder | None,
    options: Sequence[tuple[str, int | str]] = (),
    *,
    identity: str = "",
    may_use_proxy: bool = False,
) -> grpc.aio.Channel:
    """Open a channel to `target`, in plain text without a TLS folder.

    The server's certificate must be valid for `identity` or, if empty, for the host in `target`.
    """
    names = [("grpc.ssl_target_name_override", identity)] if identity and tls is not None else []
    credentials = None if tls is None else tls.channel_credentials()
    return open_channel(target, credentials, [*options, *names], may_use_proxy=may_use_proxy)


def peer_names(context: grpc.aio.ServicerContext[Any, Any]) -> set[str]:
    """The names in the certificate of the call's peer; empty without a certificate."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return {name.decode(errors="replace") for name in names}
