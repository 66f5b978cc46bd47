"""OpenTelemetry spans of a worker, one for each sequence, in the trace of the sequence's request. The worker's spans
show what was computed, and the front end's spans why the request waited."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.trace import Span, Tracer

from pagewire.v1.scheduler_output_pb2 import ModelOutput, SchedulerOutput
from pagewire_common.telemetry.tracing import TRACE_PARENT, parent_of


@dataclass(slots=True)
class _Stay:
    span: Span
    trace_parent: str
    num_sequences: int = 1
    num_steps: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    forward_us: int = 0
    """Microseconds of the forward passes with the sequence. A pass counts whole for each of its sequences."""
    last_ns: int = 0


class Stays:
    """The open spans of one session. All beams of a search share a span, because beams change in every step."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, _Stay] = {}

    def computed(self, step: SchedulerOutput, answer: ModelOutput) -> None:
        """Record a computed step in the spans of its sequences."""
        now = time.time_ns()
        timing = answer.timing
        began = now - 1000 * (timing.move_us + timing.forward_us + timing.sample_us + timing.guess_us)
        self._leave(step.preempted)
        for new in step.new_sequences:
            if new.trace_parent:
                self._come(new.sequence_id, new.trace_parent, new.index, new.num_computed_tokens, began)
        if not self._open:
            return
        ending = set(step.finished)
        for fork in step.forks:
            if (parent := self._open.get(fork.parent_sequence_id)) is None:
                continue
            if fork.parent_sequence_id in ending:  # a beam replaces its parent
                self._open[fork.child_sequence_id] = parent
                parent.num_sequences += 1
            else:
                self._come(fork.child_sequence_id, parent.trace_parent, fork.index, fork.num_computed_tokens, began)
        self._leave(step.finished)
        verified = iter(answer.num_draft_tokens)
        for column, sequence_id in enumerate(step.sequence_ids):
            samples = not step.samples or step.samples[column]
            num_tokens = step.num_scheduled_tokens[column] if step.num_scheduled_tokens else 1
            if step.num_draft_tokens:
                num_tokens -= step.num_draft_tokens[column]
            if samples:
                num_tokens += next(verified, 0)
            if (stay := self._open.get(sequence_id)) is not None:
                if stay.last_ns != now:
                    stay.num_steps += 1
                    stay.forward_us += timing.forward_us
                stay.num_tokens += num_tokens
                if samples:
                    if not stay.num_sampled:
                        stay.span.add_event("first token", timestamp=now)
                    stay.num_sampled += 1
                stay.last_ns = now

    def close(self) -> None:
        self._leave(list(self._open))

    def _come(self, sequence_id: int, trace_parent: str, index: int, num_computed_tokens: int, began: int) -> None:
        context = parent_of(((TRACE_PARENT, trace_parent),))
        attributes = {"pagewire.output.index": index, "pagewire.computed_before": num_computed_tokens}
        span = self._tracer.start_span("compute", context, attributes=attributes, start_time=began)
        self._open[sequence_id] = _Stay(span, trace_parent, last_ns=began)

    def _leave(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            if (stay := self._open.pop(sequence_id, None)) is None:
                continue
            stay.num_sequences -= 1
            if not stay.num_sequences:
                stay.span.set_attributes(
                    {
                        "pagewire.steps": stay.num_steps,
                        "pagewire.computed_tokens": stay.num_tokens,
                        "pagewire.sampled_tokens": stay.num_sampled,
                        "pagewire.forward_seconds": stay.forward_us / 1e6,
                    }
                )
                stay.span.end(stay.last_ns)
