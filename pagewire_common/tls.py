"""TLS from a folder with the names that cert-manager writes: tls.crt and tls.key are one's own, ca.crt is for the
certificates of the other side.

A server looks at the files when a connection comes, so that a renewed certificate is used from the next one on. Files
that do not belong together, because they are being replaced, are passed over until they do.
"""

import contextlib
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import structlog

from pagewire_common.channel import open_channel
from pagewire_common.start_error import StartError

log = structlog.get_logger()

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"


class _Files(NamedTuple):
    certificate: bytes | None
    key: bytes | None
    authority: bytes | None

    @property
    def pairs(self) -> list[tuple[bytes, bytes]]:
        return [] if self.certificate is None or self.key is None else [(self.key, self.certificate)]


class TlsFolder:
    """The folder of one side. Raises StartError when what is in it is no certificate, or there is none at all.

    Any thread may use it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stamp = self._look()
        try:
            self._check()
        except (OSError, ValueError) as error:
            raise StartError(f"cannot use the certificates in {folder}: {error}") from None
        self._files = self._read()
        self._generation = 0  # of the files in use

    def _look(self) -> tuple[object, ...]:
        """What changes with the files, or with the right to read them."""
        stamps: list[object] = []
        for name in (CERTIFICATE, KEY, AUTHORITY):
            try:
                status = (self._folder / name).stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
        return tuple(stamps)

    def _check(self) -> None:
        """Raises OSError or ValueError."""
        own, authority = (self._folder / CERTIFICATE, self._folder / KEY), self._folder / AUTHORITY
        if not (has_own := any(path.exists() for path in own)) and not authority.exists():
            raise ValueError(f"it has neither {CERTIFICATE} and {KEY} nor {AUTHORITY}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if has_own:
            for path in own:
                if not path.exists():
                    raise ValueError(f"it has no {path.name}; {CERTIFICATE} and {KEY} belong together")
            with _naming(f"{CERTIFICATE} and {KEY}"):
                context.load_cert_chain(*own)
        if authority.exists():
            with _naming(AUTHORITY):
                context.load_verify_locations(authority)

    def _read(self) -> _Files:
        paths = (self._folder / name for name in (CERTIFICATE, KEY, AUTHORITY))
        return _Files(*(path.read_bytes() if path.exists() else None for path in paths))

    def refresh(self) -> int:
        """Take in files that have changed and can be used; returns the number of the files in use.

        Each server compares it with the number of those that it has loaded: several of them may use a folder.
        """
        with self._lock:
            if (stamp := self._look()) != self._stamp:
                self._take(stamp)
            return self._generation

    def _take(self, stamp: tuple[object, ...]) -> None:
        try:
            self._check()
            files = self._read()
        except (OSError, ValueError) as error:
            log.error("changed certificates cannot be used; the old ones stay", reason=str(error))
            self._stamp = stamp  # said once for each change
            return
        if self._look() == stamp:  # otherwise they change at this moment
            self._stamp, self._files = stamp, files
            self._generation += 1
            log.info("certificates read again")

    def _need_own(self, *, mutual: bool) -> None:
        if not self._files.pairs:
            raise StartError(f"a server needs {CERTIFICATE} and {KEY}, which {self._folder} has not")
        if mutual and self._files.authority is None:
            raise StartError(f"clients' certificates are checked with {AUTHORITY}, which {self._folder} has not")

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """For a gRPC server; with `mutual`, clients need certificates as well. Raises StartError."""
        self._need_own(mutual=mutual)
        loaded = self.refresh()

        def configuration() -> Any:
            return grpc.ssl_server_certificate_configuration(self._files.pairs, self._files.authority)

        def if_changed() -> Any:  # gRPC asks at each handshake, on a thread of its own
            nonlocal loaded
            if (generation := self.refresh()) == loaded:
                return None
            loaded = generation
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), if_changed, mutual)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC client, from the files as they are now. Without ca.crt the system's authorities count."""
        self.refresh()
        key, certificate = self._files.pairs[0] if self._files.pairs else (None, None)
        return grpc.ssl_channel_credentials(self._files.authority, key, certificate)

    def client_context(self) -> ssl.SSLContext:
        """The same for HTTP."""
        authority = self._folder / AUTHORITY
        context = ssl.create_default_context(cafile=authority if authority.exists() else None)
        if self._files.pairs:
            context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)
        return context

    def server_context(self, *, mutual: bool) -> ssl.SSLContext:
        """For an HTTP server, of the files as they are now. Raises StartError, or OSError while they change."""
        self._need_own(mutual=mutual)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._folder / AUTHORITY)
        return context


@contextlib.contextmanager
def _naming(files: str) -> Iterator[None]:
    """Has errors of ssl, which leave out what was read, name the files. Raises ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{files} cannot be read as PEM: {error.strerror or error}") from None


class Security(NamedTuple):
    """What the callers of a server need: TLS if there is a folder, a certificate of their own if it is `mutual`, and
    one that has the name `identity` if that is not empty.
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
    """A channel to `target`, in plain text where there is no folder.

    The server's certificate must be for `identity`, or for the host in `target` if it is empty.
    """
    names = [("grpc.ssl_target_name_override", identity)] if identity and tls is not None else []
    credentials = None if tls is None else tls.channel_credentials()
    return open_channel(target, credentials, [*options, *names], may_use_proxy=may_use_proxy)


def peer_names(context: grpc.aio.ServicerContext[Any, Any]) -> set[str]:
    """The names in the certificate of a call's other side; none where it has shown no certificate."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return {name.decode(errors="replace") for name in names}
