"""The times at which a device reached the marks of a step. Setting a mark does not wait for the device. Reading the
times waits.
"""

import time
from itertools import pairwise

import torch


class StepClock:
    """The marks of one step, on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        """Set the first mark."""
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[int] = []
        self.mark()

    def mark(self) -> None:
        """Set a mark, which ends one part of the step's work and begins the next part."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter_ns() // 1000)

    def has_stopped(self) -> bool:
        """Whether the device has reached the last mark."""
        return not self._is_cuda or bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def durations(self) -> list[int]:
        """Microseconds of each part of the step. Waits until the device has reached the last mark."""
        if not self._is_cuda:
            return [later - earlier for earlier, later in pairwise(self._times)]
        self._events[-1].synchronize()
        return [round(1e3 * earlier.elapsed_time(later)) for earlier, later in pairwise(self._events)]
