"""Adds advice to the error of a failed call: a wrong proxy, port, TLS setting, protocol (HTTP/1.1) or certificate."""

import asyncio
import ssl
from dataclasses import dataclass

import grpc

from pagewire_common.connection.channel import proxy_of, split_target

PROBE_SECONDS = 2.0
"""Seconds for the TLS handshake that is tried if a port closes plain-text connections."""
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe")
"""gRPC's errors of a plain-text call to a TLS port, and when a server stops."""
_OF_THE_CONNECTION = ("failed to connect", "errors resolving", *_CLOSED)
_NO_TLS = "WRONG_VERSION_NUMBER"
_NOT_VERIFIED = "CERTIFICATE_VERIFY_FAILED"
_OTHER_NAME = "Hostname Verification Check failed"
_HTTP_1 = "Trying to connect an http1.x server"
_NO_METHOD = "Method not found!"


class MisdirectedError(grpc.aio.AioRpcError):
    """The error of a call that fails at every retry with this address, proxy or TLS setting."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The address, TLS setting and proxy of a client's calls. The advice names `tls_option` and `port_hint`."""

    target: str
    has_tls: bool
    tls_option: str
    port_hint: str
    may_use_proxy: bool = False

    async def explain(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Add advice to a call's error. Returns a MisdirectedError if the same call can never succeed."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNIMPLEMENTED and details == _NO_METHOD:
            return _with(error, f"{self.target} does not have this call: {self.port_hint}")
        if code is not grpc.StatusCode.UNAVAILABLE:
            return error
        if not any(words in details for words in _OF_THE_CONNECTION):
            return error  # the server sent the error, so the connection works
        if _OTHER_NAME in details:
            return _with(error, f"the certificate of {self.target} is not for {self._host}", MisdirectedError)
        if _NOT_VERIFIED in details:
            reason = f"has expired, or is signed by no authority in the ca.crt of {self.tls_option}"
            return _with(error, f"the certificate of {self.target} {reason}", MisdirectedError)
        if self.may_use_proxy and (proxy := proxy_of(self.target)):
            return _with(error, f"the call went through the proxy {proxy}; no_proxy={self._host} makes it direct")
        if self.has_tls:
            if _NO_TLS in details:
                reason = f"{self.target} does not speak TLS: leave {self.tls_option} out, or {self.port_hint}"
                return _with(error, reason, MisdirectedError)
        elif any(words in details for words in _CLOSED) and await self._speaks_tls():
            reason = f"{self.target} speaks TLS: give {self.tls_option} a folder with the ca.crt of its certificate"
            return _with(error, reason, MisdirectedError)
        if _HTTP_1 in details:
            return _with(error, f"{self.target} speaks HTTP/1.1 and no gRPC: {self.port_hint}", MisdirectedError)
        return error

    @property
    def _host(self) -> str:
        return split_target(self.target)[0]

    async def _speaks_tls(self) -> bool:
        host, port = split_target(self.target)
        if port is None:
            return False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the trial handshake sends no data
        context.set_alpn_protocols(["h2"])
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(host, port, ssl=context)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True


def _with(
    error: grpc.aio.AioRpcError, advice: str, kind: type[grpc.aio.AioRpcError] = grpc.aio.AioRpcError
) -> grpc.aio.AioRpcError:
    return kind(
        error.code(),
        error.initial_metadata(),
        error.trailing_metadata(),
        f"{advice} ({error.details()})",
        error.debug_error_string(),
    )
