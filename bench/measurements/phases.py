"""The time of a step by phase, for our steps under a load. The scheduler measures the phases."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.v1.admin_service_pb2 import StepSplit

PHASES = ("schedule", "encode", "wire", "move", "forward", "sample", "guess", "decode", "update", "publish")
"""Phases in the order of a step."""
MODEL_PHASES = frozenset(("move", "forward", "sample", "guess"))
"""The worker's phases. All other phases belong to the scheduler, the codec and gRPC."""


@dataclass(frozen=True, slots=True)
class Split:
    """Microseconds per step by phase, averaged over `num_steps` steps."""

    num_steps: int
    us: dict[str, float]

    @property
    def model_us(self) -> float:
        """Microseconds of the model's phases in a step."""
        return sum(us for phase, us in self.us.items() if phase in MODEL_PHASES)

    @property
    def overhead_percent(self) -> float:
        """Percentage of the scheduler, codec and gRPC in the sum of all phases. The scheduler's phases count in full,
        even while the worker computes.
        """
        return 100 * (1 - self.model_us / sum(self.us.values()))

    def idle_us(self, seconds: float) -> float:
        """Idle microseconds of the device per step, if all steps together take `seconds`."""
        return 1e6 * seconds / self.num_steps - self.model_us


def split_between(readings: Sequence[tuple[StepSplit, StepSplit]]) -> Split:
    """The mean times of the phases over all runs of a load. `readings` contains a reading before and a reading after
    each run.
    """
    num_steps = sum(after.num_steps - before.num_steps for before, after in readings)

    us = {
        phase: sum(getattr(after, f"{phase}_us") - getattr(before, f"{phase}_us") for before, after in readings)
        for phase in PHASES
    }
    return Split(num_steps, {phase: total / num_steps for phase, total in us.items()})
