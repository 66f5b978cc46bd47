"""Trace spans: one span for each call, and within a call's span, one span for each phase of the call's requests.

A request's phases are queue, prefill and decode. After a preemption, a span `preemption` lasts until the request runs
again. If a preempted request continues on another worker, its span has the name `move` instead of `preemption`. The
names of span attributes follow OpenTelemetry's conventions for generative AI (gen_ai.…), or begin with `pagewire.`. No
attribute reveals a prompt or an output.
"""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context

from pagewire.v1.engine_service_pb2 import Standing
from pagewire_common.telemetry.tracing import parent_of, trace_parent
from scheduler_service.frontend.output.request import GenerationRequest

CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
"""Names of operations in OpenTelemetry's conventions, which define no names for scoring and transcription."""
SCORE, TRANSCRIPTION = "score", "transcription"
MAX_PHASES = 64
"""Largest number of phase spans of a call. Only a call whose requests are preempted many times reaches this limit."""
MAX_REQUESTS = 16
"""Largest number of requests of a call that have spans. An Embed call, with up to 2,048 texts, exceeds this limit."""


def trace_id_of(metadata: Any) -> str:
    """The trace id in a call's metadata; empty if the caller sent no trace id."""
    context = get_current_span(parent_of(metadata)).get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


class CallTrace:
    """The span of a call, from the call's arrival until `end`. `operation`: value of gen_ai.operation.name."""

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
        """The trace parent that workers use for their spans."""
        return trace_parent(self._context)

    def describe(self, model: str, tenant: str, priority: int) -> None:
        """Add attributes about the model and the tenant. Call `describe` after the API key's model is checked."""
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
        """Add attributes about the sampling parameters of a checked request."""
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
        """Begin the trace of another request of the call. All spans of the request get `attributes`.

        Returns None if the trace is not sampled, or if `MAX_REQUESTS` requests of the call already have spans.
        """
        if not self._span.is_recording() or len(self._requests) >= MAX_REQUESTS:
            return None
        request = RequestTrace(self, {f"pagewire.{name}": value for name, value in attributes.items()})
        self._requests.append(request)
        return request

    def start_phase(self, name: str, at: float, attributes: Mapping[str, Any]) -> Span | None:
        """Start the span of a phase. Returns None if the call already has `MAX_PHASES` phase spans."""
        self._num_phases += 1
        if self._num_phases > MAX_PHASES:
            return None
        return self._tracer.start_span(name, self._context, attributes=attributes, start_time=self.ns(at))

    def ns(self, at: float) -> int:
        """Convert seconds of the monotonic clock to nanoseconds since 1970, the unit of span times."""
        return int(at * 1e9) + self._offset

    def end(self, status: str, error: str, figures: Mapping[str, Any]) -> None:
        """End the call's span. `status`: name of the gRPC status. `figures`: values of the call's log line, by name."""
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
    """The spans of one request of a call, from submission until `end`.

    All arguments for times are seconds of the monotonic clock.
    """

    def __init__(self, call: CallTrace, attributes: Mapping[str, Any]) -> None:
        self._call = call
        self._attributes = attributes
        self._phase: Span | None = None
        self._computes = "prefill"
        self._has_tokens, self._awaits_token = False, True
        self._runs = False
        self._standing = Standing()

    def submitted(self, request: GenerationRequest, arrived_at: float) -> str:
        """Begin the phase `queue`. Returns the trace parent for the worker."""
        if request.sampling.beam_width:
            self._computes = "beam search"
        self._begin("queue", arrived_at)
        return self._call.parent

    def stands(self, standing: Standing) -> None:
        """Begin a phase if the request has started to run, has moved to another worker, or has been preempted."""
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
        """Record a new token; the first token after a prefill begins the phase `decode`."""
        if self._awaits_token:
            self._awaits_token, self._has_tokens = False, True
            if self._runs:
                self._begin("decode", now, {"pagewire.worker": self._standing.place.worker})

    def _begin(self, name: str, at: float, attributes: Mapping[str, Any] | None = None) -> None:
        self.end(at)
        self._phase = self._call.start_phase(name, at, {**self._attributes, **(attributes or {})})

    def end(self, at: float) -> None:
        """End the request's last phase."""
        if self._phase is not None:
            self._phase.end(self._call.ns(at))
            self._phase = None
