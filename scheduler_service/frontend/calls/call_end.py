"""How a call ended, for its log line and its span."""

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
    """`status` is a status's name, `sentence` the message to the client."""

    status: str = "OK"
    sentence: str = ""
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record how the `with` block ends."""
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
    """Log one line of a call, however it ends, as an `event`, and record a span if there is a tracer.

    `figures` is called at the end, for both. The figures have nothing of the request's or the answer's content.
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
    """A call's tenant and adapter, for its log line."""
    key = caller.get()
    names = {"tenant": (tenant if key is None else key.tenant)[:MAX_STRING]}
    if key is not None:
        names["api_key"] = key.id
    if lora_name:
        names["lora_name"] = lora_name[:MAX_STRING]
    return names
