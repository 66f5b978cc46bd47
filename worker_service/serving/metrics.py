"""Prometheus metrics of the work that a worker computes. The scheduler serves the metrics of requests."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.v1.scheduler_output_pb2 import ModelOutput, SchedulerOutput


@dataclass(slots=True)
class WorkerStatistics:
    """Numbers and durations of a worker's work since its start. Durations are in microseconds."""

    num_sessions: int = 0
    num_steps: int = 0
    num_failures: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    move_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    guess_us: int = 0

    def count(self, step: SchedulerOutput, answer: ModelOutput) -> None:
        """Count a computed step."""
        self.num_steps += 1
        self.num_tokens += sum(step.num_scheduled_tokens) or len(step.sequence_ids)
        self.num_tokens += sum(answer.num_draft_tokens) - sum(step.num_draft_tokens)
        self.num_sampled_tokens += len(answer.token_ids)
        self.move_us += answer.timing.move_us
        self.forward_us += answer.timing.forward_us
        self.sample_us += answer.timing.sample_us
        self.guess_us += answer.timing.guess_us


def families(
    statistics: WorkerStatistics, *, num_sequences: int, num_device_blocks: int, num_host_blocks: int, draining: bool
) -> Iterator[Metric]:
    """The current values of the worker's metrics.

    num_sequences: the number of live sequences of the open session. num_device_blocks, num_host_blocks: 0 until the
    model is loaded.
    """
    for name, text, value in (
        ("sequences", "Sequences that live in the open session.", num_sequences),
        ("device_blocks", "Blocks in device memory; 0 until the model is loaded.", num_device_blocks),
        ("host_blocks", "Blocks in host memory, for swapping.", num_host_blocks),
        ("draining", "1 while the worker is shutting down.", draining),
    ):
        yield GaugeMetricFamily(f"pagewire_worker_{name}", text, value)
    for name, text, value in (
        ("sessions", "Sessions that schedulers opened.", statistics.num_sessions),
        ("steps", "Steps computed.", statistics.num_steps),
        ("failures", "Sessions that ended because a step failed.", statistics.num_failures),
        ("tokens", "Tokens whose keys and values were computed.", statistics.num_tokens),
        ("sampled_tokens", "Tokens sampled.", statistics.num_sampled_tokens),
    ):
        yield CounterMetricFamily(f"pagewire_worker_{name}", text, value)
    phases = CounterMetricFamily("pagewire_worker_step_phase_seconds", "Where steps' time went.", labels=["phase"])
    for phase in ("move", "forward", "sample", "guess"):
        phases.add_metric([phase], getattr(statistics, f"{phase}_us") / 1e6)
    yield phases
