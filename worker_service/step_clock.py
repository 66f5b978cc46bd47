"""When a device reached the marks of a step. Setting a mark does not wait for it; reading how long it took does."""

import time
from itertools import pairwise

import torch


class StepClock:
    """For steps of one device, one after the other, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[int] = []
        self._num_marks = 0

    def start(self) -> None:
        """Begin a step, with its first mark."""
        self._num_marks = 0
        self._times.clear()
        self.mark()

    def mark(self) -> None:
        """What was asked of the device so far is a part of the step."""
        if not self._is_cuda:
            self._times.append(time.perf_counter_ns() // 1000)
            return
        if self._num_marks == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._num_marks].record()
        self._num_marks += 1

    def durations(self) -> list[int]:
        """Microseconds of each part, once the device has done the last."""
        if not self._is_cuda:
            return [later - earlier for earlier, later in pairwise(self._times)]
        events = self._events[: self._num_marks]
        events[-1].synchronize()
        return [round(1e3 * a.elapsed_time(b)) for a, b in pairwise(events)]
