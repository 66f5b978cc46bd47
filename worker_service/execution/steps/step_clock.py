"""Measures the parts of a step on the device. A mark is set between two parts. Setting a mark does not wait for the
device, but reading the durations does.
"""

import time
from itertools import pairwise

import torch


class StepClock:
    """Measures one step with marks between its parts. On a GPU, each mark is a CUDA event in the current stream."""

    def __init__(self, device: torch.device) -> None:
        """Set the mark before the first part."""
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[int] = []
        self.mark()

    def mark(self) -> None:
        """Set a mark between two parts of the step, or after the last part."""
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
        """The durations of the step's parts in microseconds. The method waits until the device has reached the last
        mark.
        """
        if not self._is_cuda:
            return [later - earlier for earlier, later in pairwise(self._times)]
        self._events[-1].synchronize()
        return [round(1e3 * earlier.elapsed_time(later)) for earlier, later in pairwise(self._events)]
