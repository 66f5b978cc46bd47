"""An OpenTelemetry collector that keeps its spans."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class FoundSpan:
    service: str
    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    is_error: bool
    events: tuple[str, ...]


@dataclass
class Collector(pb_grpc.TraceServiceServicer):  # type: ignore[misc]  # its package has no types
    endpoint: str = ""
    spans: list[FoundSpan] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:  # noqa: N802
        with self.came:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(service, span) for span in scope.spans]
            self.came.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait_for(self, trace: str, is_whole: Callable[[list[FoundSpan]], bool], timeout: float = 60) -> list[FoundSpan]:
        """The spans of a trace in the order of their beginnings, once `is_whole`."""

        def found() -> list[FoundSpan]:
            return sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.start)

        with self.came:
            assert self.came.wait_for(lambda: is_whole(found()), timeout), found()
            return found()


def _span(service: str, span: Any) -> FoundSpan:
    return FoundSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
        tuple(event.name for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(found, server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(None).wait()
