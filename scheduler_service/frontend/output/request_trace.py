"""Spans: one of each call, and within it, for each request of the call, what this waited for or had computed.

queue, then prefill and decode; preemption until it is computed again, or move if that is on another worker. Attributes
have the names of OpenTelemetry's conventions for generative AI (gen_ai.…), or begin with pagewire.; nothing of what was
asked or answered is in them.
"""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context

from pagewire.v1.engine_service_pb2 import Standing
from pagewire_common.telemetry.tracing import parent_of, trace_parent
from scheduler_service.frontend.output.request import GenerationRequest

CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
"""Operations, as those conventions name them; they have no names for the others."""
SCORE, TRANSCRIPTION = "score", "transcription"
MAX_PHASES = 64
"""Spans of one call within that of all of it: one whose request is preempted again and again has no more."""
MAX_REQUESTS = 16
"""Requests of one call that have spans: Embed may have 2,048 texts."""


def trace_id_of(metadata: Any) -> str:
    """The trace that a caller says its call belongs to; empty if it says nothing."""
    context = get_current_span(parent_of(metadata)).get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


class CallTrace:
    """The span of a call, from its arrival until `end`. `operation` is what gen_ai.operation.name has."""

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
        """The parent of the worker's spans."""
        return trace_parent(self._context)

    def describe(self, model: str, tenant: str, priority: int) -> None:
        """The call may use this model."""
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
        """The request has been checked."""
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
        """One more request of the call, which has these attributes in its spans. None if it is to have no spans: the
        trace is not sampled, or others of the call have them.
        """
        if not self._span.is_recording() or len(self._requests) >= MAX_REQUESTS:
            return None
        request = RequestTrace(self, {f"pagewire.{name}": value for name, value in attributes.items()})
        self._requests.append(request)
        return request

    def start_phase(self, name: str, at: float, attributes: Mapping[str, Any]) -> Span | None:
        """None where the call has spans enough."""
        self._num_phases += 1
        if self._num_phases > MAX_PHASES:
            return None
        return self._tracer.start_span(name, self._context, attributes=attributes, start_time=self.ns(at))

    def ns(self, at: float) -> int:
        """A time of the monotonic clock, in seconds, as spans have it."""
        return int(at * 1e9) + self._offset

    def end(self, status: str, error: str, figures: Mapping[str, Any]) -> None:
        """The call is over, with this status of gRPC; `figures` are those of its line in the log."""
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
    """One request of a call, from its submission until `end`. Times are seconds of the monotonic clock."""

    def __init__(self, call: CallTrace, attributes: Mapping[str, Any]) -> None:
        self._call = call
        self._attributes = attributes
        self._phase: Span | None = None
        self._computes = "prefill"
        self._has_tokens, self._awaits_token = False, True
        self._runs = False
        self._standing = Standing()

    def submitted(self, request: GenerationRequest, arrived_at: float) -> str:
        """The request is queued. Returns what the worker needs to know."""
        if request.sampling.beam_width:
            self._computes = "beam search"
        self._begin("queue", arrived_at)
        return self._call.parent

    def stands(self, standing: Standing) -> None:
        """The engine tells where the request is."""
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
        """An output gained a token."""
        if self._awaits_token:
            self._awaits_token, self._has_tokens = False, True
            if self._runs:
                self._begin("decode", now, {"pagewire.worker": self._standing.place.worker})

    def _begin(self, name: str, at: float, attributes: Mapping[str, Any] | None = None) -> None:
        self.end(at)
        self._phase = self._call.start_phase(name, at, {**self._attributes, **(attributes or {})})

    def end(self, at: float) -> None:
        """Nothing more is computed of it."""
        if self._phase is not None:
            self._phase.end(self._call.ns(at))
            self._phase = None
