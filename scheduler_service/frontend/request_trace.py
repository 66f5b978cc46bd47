"""A request's spans: one of all of it, and within that one after the other of what it waited for or had computed.

queue, then prefill and decode; preemption until it is computed again, or move if that is on another worker. Attributes
have the names of OpenTelemetry's conventions for generative AI (gen_ai.…), or begin with pagewire.; nothing of what was
asked or answered is in them.
"""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.engine_service_pb2 import Standing
from pagewire_common.tracing import parent_of, trace_parent
from scheduler_service.frontend.request import GenerationRequest

MOST_PHASES = 64
"""Spans of one request within that of all of it: one that is preempted again and again has no more."""


def trace_id_of(metadata: Any) -> str:
    """The trace that a caller says its call belongs to; empty if it says nothing."""
    context = get_current_span(parent_of(metadata)).get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


class RequestTrace:
    """From the arrival of a call until `end`. Times are seconds of the monotonic clock."""

    def __init__(self, tracer: Tracer, metadata: Any, request: pb.GenerateRequest) -> None:
        self._tracer = tracer
        self._offset = time.time_ns() - time.monotonic_ns()
        self._operation = "chat" if request.HasField("chat") else "text_completion"
        self._span = tracer.start_span(self._operation, parent_of(metadata), kind=SpanKind.SERVER)
        self._context = set_span_in_context(self._span)
        self._phase: Span | None = None
        self._num_phases = 0
        self._computes = "prefill"
        self._has_tokens, self._awaits_token = False, True
        self._runs = False
        self._standing = Standing()

    @property
    def id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def parent(self) -> str:
        """What the worker needs to know; empty if the trace is not sampled."""
        return trace_parent(self._context) if self._span.is_recording() else ""

    def submitted(self, request: GenerationRequest, model: str, arrived_at: float) -> None:
        """The request has been checked, and is queued."""
        sampling = request.sampling
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes(
            {
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "pagewire",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.id": request.request_id,
                "gen_ai.request.choice.count": request.num_outputs,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.usage.input_tokens": request.num_prompt_tokens,
                "pagewire.tenant": request.tenant,
                "pagewire.priority": request.priority,
            }
        )
        if sampling.beam_width:
            self._computes = "beam search"
        self._begin("queue", arrived_at)

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
        self._end_phase(at)
        self._num_phases += 1
        if self._num_phases <= MOST_PHASES:
            self._phase = self._tracer.start_span(name, self._context, attributes=attributes, start_time=self._ns(at))

    def _end_phase(self, at: float) -> None:
        if self._phase is not None:
            self._phase.end(self._ns(at))
            self._phase = None

    def _ns(self, at: float) -> int:
        return int(at * 1e9) + self._offset

    def end(self, status: str, error: str, figures: Mapping[str, Any]) -> None:
        """The call is over, with this status of gRPC; `figures` are those of its line in the log."""
        self._end_phase(time.monotonic())
        for name, figure in figures.items():
            match name:
                case "prompt_tokens":
                    continue
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
