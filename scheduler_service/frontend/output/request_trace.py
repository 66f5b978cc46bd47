"""Records a call: its log line and, with tracing, one span for the call and one for each phase of its requests.

Phases are queue, prefill and decode, and after a preemption `preemption` (on another worker: `move`). Attributes are
OpenTelemetry's (gen_ai.…) or begin with `pagewire.`; none reveals a prompt or an output.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.engine_service_pb2 import Standing
from pagewire_common.calls.errors import RequestError
from pagewire_common.sampling import MAX_STRING
from pagewire_common.telemetry.tracing import TRACE_PARENT, parent_of, trace_parent
from scheduler_service.access.audit import leave_own_line, statuses
from scheduler_service.access.caller import caller
from scheduler_service.frontend.output.request import GenerationRequest

log = structlog.get_logger()

Request = pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest | pb.TranscribeRequest

CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
"""Operations in OpenTelemetry's conventions, which name neither scoring nor transcription."""
SCORE, TRANSCRIPTION = "score", "transcription"
MAX_PHASES = 64
"""Largest number of phase spans of a call, reached only after many preemptions."""
MAX_REQUESTS = 16
"""Largest number of requests of a call that have spans. An Embed call may have 2,048 texts."""


def trace_id_of(metadata: Any) -> str:
    """The trace id in a call's metadata; empty without one."""
    if not any(name == TRACE_PARENT for name, _ in metadata):
        return ""
    context = get_current_span(parent_of(metadata)).get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


class CallTrace:
    def __init__(self, tracer: Tracer, metadata: Any, operation: str) -> None:
        self._tracer = tracer
        self._offset = time.time_ns() - time.monotonic_ns()
        self._operation = operation
        self._span = tracer.start_span(operation, parent_of(metadata), kind=SpanKind.SERVER)
        self._context = set_span_in_context(self._span)
        self._requests: list[RequestTrace] = []
        self._num_phases = 0

    @property
    def id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def parent(self) -> str:
        return trace_parent(self._context)

    def describe(self, model: str, tenant: str, priority: int) -> None:
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes(
            {
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "pagewire",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "pagewire.tenant": tenant,
                "pagewire.priority": priority,
            }
        )

    def describe_sampling(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        self._span.set_attributes(
            {
                "gen_ai.request.choice.count": request.num_outputs,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            }
        )

    def request(self, **attributes: int) -> "RequestTrace | None":
        """Begin the trace of another request. None if the trace is not sampled, or beyond `MAX_REQUESTS`."""
        if not self._span.is_recording() or len(self._requests) >= MAX_REQUESTS:
            return None
        request = RequestTrace(self, {f"pagewire.{name}": value for name, value in attributes.items()})
        self._requests.append(request)
        return request

    def start_phase(self, name: str, at: float, attributes: Mapping[str, Any]) -> Span | None:
        self._num_phases += 1
        if self._num_phases > MAX_PHASES:
            return None
        return self._tracer.start_span(name, self._context, attributes=attributes, start_time=self.ns(at))

    def ns(self, at: float) -> int:
        """Convert seconds of the monotonic clock to nanoseconds since 1970, the unit of span times."""
        return int(at * 1e9) + self._offset

    def end(self, status: str, error: str, figures: Mapping[str, Any]) -> None:
        """End the span. `status`: name of the gRPC status. `figures`: values of the call's log line, by name."""
        now = time.monotonic()
        for request in self._requests:
            request.end(now)
        for name, figure in figures.items():
            match name:
                case "request_id":
                    self._span.set_attribute("gen_ai.response.id", figure)
                case "prompt_tokens":
                    self._span.set_attribute("gen_ai.usage.input_tokens", figure)
                case "output_tokens":
                    self._span.set_attribute("gen_ai.usage.output_tokens", sum(figure))
                case "finish_reasons":
                    self._span.set_attribute("gen_ai.response.finish_reasons", figure)
                case _:
                    self._span.set_attribute(f"pagewire.{name}", figure)
        self._span.set_attribute("rpc.response.status_code", status)
        if status not in ("OK", "CANCELLED"):
            self._span.set_attribute("error.type", status)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class RequestTrace:
    """The spans of one request, from submission until `end`. Times are seconds of the monotonic clock."""

    def __init__(self, call: CallTrace, attributes: Mapping[str, Any]) -> None:
        self._call = call
        self._attributes = attributes
        self._phase: Span | None = None
        self._computes = "prefill"
        self._has_tokens, self._awaits_token = False, True
        self._runs = False
        self._standing = Standing()

    def submitted(self, request: GenerationRequest, arrived_at: float) -> str:
        if request.sampling.beam_width:
            self._computes = "beam search"
        self._begin("queue", arrived_at)
        return self._call.parent

    def stands(self, standing: Standing) -> None:
        """Begin a phase if the request has started, moved to another worker, or been preempted."""
        place, before = standing.place, self._standing
        self._standing = standing
        if not standing.HasField("place"):
            return
        is_swapped = standing.num_swaps > before.num_swaps
        if self._runs and (is_swapped or standing.num_recomputes > before.num_recomputes):
            self._runs, self._awaits_token = False, not (is_swapped and self._has_tokens)
            self._begin("preemption", place.at, {"pagewire.preemption": "swap" if is_swapped else "recompute"})
        if place.runs and not self._runs:
            self._runs = True
            if self._phase is not None and standing.num_worker_changes > before.num_worker_changes:
                self._phase.update_name("move")
            self._begin(self._computes if self._awaits_token else "decode", place.at, {"pagewire.worker": place.worker})

    def gained_token(self, now: float) -> None:
        """Record a new token; the first after a prefill begins the phase `decode`."""
        if self._awaits_token:
            self._awaits_token, self._has_tokens = False, True
            if self._runs:
                self._begin("decode", now, {"pagewire.worker": self._standing.place.worker})

    def _begin(self, name: str, at: float, attributes: Mapping[str, Any] | None = None) -> None:
        self.end(at)
        self._phase = self._call.start_phase(name, at, {**self._attributes, **(attributes or {})})

    def end(self, at: float) -> None:
        if self._phase is not None:
            self._phase.end(self._call.ns(at))
            self._phase = None


@dataclass
class CallEnd:
    """How a call ended. `status`: name of the gRPC status. `sentence`: error message to the client."""

    status: str = "OK"
    sentence: str = ""
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
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
    """Write a log line `event` at the end of the `with` block, which contains the call. With a tracer, also record a
    span.

    `figures`: values for both, without content of the request or of the answer.
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
        if end.sentence:
            names["reason"] = end.sentence[:MAX_STRING]
        known = {"total_seconds": end.seconds, **figures()}
        if trace is not None:
            trace.end(end.status, end.sentence, known)
        log.info(event, **statuses(end.status), **names, **known)


def names_of(tenant: str, lora_name: str) -> dict[str, Any]:
    key = caller.get()
    names = {"tenant": (tenant if key is None else key.tenant)[:MAX_STRING]}
    if key is not None:
        names["api_key"] = key.id
    if lora_name:
        names["lora_name"] = lora_name[:MAX_STRING]
    return names
