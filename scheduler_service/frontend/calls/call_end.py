"""Records how a call ended, in the call's log line and in its trace span."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from opentelemetry.trace import Tracer

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.sampling import MAX_STRING
from scheduler_service.access.audit import leave_own_line
from scheduler_service.access.caller import caller
from scheduler_service.frontend.output.request_trace import CallTrace, trace_id_of

log = structlog.get_logger()

Request = pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest | pb.TranscribeRequest


@dataclass
class CallEnd:
    """How a call ended. `status`: name of the gRPC status. `sentence`: error message to the client."""

    status: str = "OK"
    sentence: str = ""
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record how the `with` block, which contains the call, ends."""
        try:
            yield
        except RequestError as error:
            self.status, self.sentence = error.code.name, str(error)
            raise
        except asyncio.CancelledError:
            self.status = "CANCELLED"
            raise
        except BaseException:
            self.status = "INTERNAL"
            raise


@contextlib.contextmanager
def recorded(
    event: str,
    operation: str,
    request: Request,
    context: grpc.aio.ServicerContext[Any, Any],
    tracer: Tracer | None,
    figures: Callable[[], Mapping[str, Any]],
) -> Iterator[CallTrace | None]:
    """Write a log line `event` when the call in the `with` block ends or fails. With a tracer, also record a span.

    At the end of the call, `figures` returns values for the log line and the span. The values must reveal no content of
    the request or of the answer.
    """
    leave_own_line()
    metadata = context.invocation_metadata() or ()
    trace = CallTrace(tracer, metadata, operation) if tracer is not None else None
    trace_id = trace.id if trace is not None else trace_id_of(metadata)
    end = CallEnd()
    try:
        with end.noting():
            yield trace
    finally:
        names = names_of(request.tenant, request.lora_name)
        if trace_id:
            names["trace_id"] = trace_id
        known = {"total_seconds": end.seconds, **figures()}
        if trace is not None:
            trace.end(end.status, end.sentence, known)
        log.info(event, status=end.status, **names, **known)


def names_of(tenant: str, lora_name: str) -> dict[str, Any]:
    """The tenant, API key and adapter of a call, for the call's log line."""
    key = caller.get()
    names = {"tenant": (tenant if key is None else key.tenant)[:MAX_STRING]}
    if key is not None:
        names["api_key"] = key.id
    if lora_name:
        names["lora_name"] = lora_name[:MAX_STRING]
    return names
