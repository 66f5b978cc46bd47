"""The time of each phase of pagewire's steps under a load, measured by its scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.v1.admin_service_pb2 import StepSplit

PHASES = ("schedule", "encode", "wire", "move", "images", "forward", "sample", "guess", "decode", "update", "publish")
MODEL_PHASES = frozenset(("move", "images", "forward", "sample", "guess"))
"""The worker computes. All others are the scheduler, the codec and gRPC."""


@dataclass(frozen=True, slots=True)
class Split:
    """Microseconds per step, averaged over `num_steps`."""

    num_steps: int
    us: dict[str, float]

    @property
    def model_us(self) -> float:
        """Microseconds in which the worker computes."""
        return sum(us for phase, us in self.us.items() if phase in MODEL_PHASES)

    @property
    def overhead_percent(self) -> float:
        """Time of the scheduler, codec and gRPC in percent of all phases, even while the worker computes."""
        return 100 * (1 - self.model_us / sum(self.us.values()))

    def idle_us(self, seconds: float) -> float:
        """Microseconds per step in which the device is idle, if all steps take `seconds`."""
        return 1e6 * seconds / self.num_steps - self.model_us


def split_between(readings: Sequence[tuple[StepSplit, StepSplit]]) -> Split:
    """The mean over runs. `readings` are the scheduler's times before and after each."""
    num_steps = sum(after.num_steps - before.num_steps for before, after in readings)

    us = {
        phase: sum(getattr(after, f"{phase}_us") - getattr(before, f"{phase}_us") for before, after in readings)
        for phase in PHASES
    }
    return Split(num_steps, {phase: total / num_steps for phase, total in us.items()})
