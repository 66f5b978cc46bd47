"""OpenTelemetry traces, exported by OTLP over gRPC if an endpoint is set. The SDK's variables also apply."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import urlsplit

import structlog
from opentelemetry.context import Context
from opentelemetry.trace import Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagewire_common.connection.channel import DIRECT, proxy_of
from pagewire_common.start_error import StartError

log = structlog.get_logger()
TRACE_PARENT = "traceparent"
MAX_HEADER = 1024
"""Characters of a trace header above which it is ignored. A traceparent has 55."""
_HEADERS = (TRACE_PARENT, "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # its warnings quote the tracestate
EXPORT_SECONDS = 3.0
"""Seconds for exporting one batch. If nothing listened, the two services needed 1.2 s and 1.0 s to end."""


def check_endpoint(endpoint: str | None) -> str | None:
    """Check that an endpoint is http://HOST:PORT, or https:// for TLS; None if it is empty. Raises ValueError."""
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"'{endpoint}' is not http://HOST:PORT or https://HOST:PORT")
    return endpoint


@contextlib.asynccontextmanager
async def tracing(endpoint: str | None, service: str) -> AsyncIterator[Tracer | None]:
    """Yield a tracer, or None without an endpoint. At the end, export the remaining spans. Raises StartError."""
    if endpoint is None:
        yield None
        return
    # Importing the SDK takes 0.3 s.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    timeout = None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else EXPORT_SECONDS
    try:
        proxy = proxy_of(urlsplit(endpoint).netloc)
    except ValueError as error:
        raise StartError(str(error)) from None
    if proxy:
        log.info("spans are sent through a proxy", endpoint=endpoint, proxy=proxy)
    route: Any = () if proxy else DIRECT
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout, channel_options=route)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("pagewire")
    finally:
        await asyncio.to_thread(provider.shutdown)


def parent_of(metadata: Iterable[tuple[str, Any]]) -> Context:
    """The caller's trace context in its metadata, in W3C's format; empty without one."""
    carrier = {
        name: value
        for name, value in metadata
        if name in _HEADERS and isinstance(value, str) and len(value) <= MAX_HEADER
    }
    return _PROPAGATOR.extract(carrier, Context()) if carrier else Context()


def trace_parent(context: Context) -> str:
    """The traceparent of a context, for the next process."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier.get(TRACE_PARENT, "")
