"""A worker as the balancer sees it: its scheduler's interface and last report."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.step_times import Slowness

# Tokens that a running sequence is expected to compute yet: about the median in public traces.
SEQUENCE_TOKENS = 128
# Expected seconds of a worker's first fetch: rank 16 for 7 billion weights over a fast network.
ADAPTER_SECONDS = 1.0


class StepInFlight(Protocol):
    @property
    def num_tokens(self) -> int: ...

    @property
    def planned_at(self) -> float: ...


class WorkerScheduler(Protocol):
    """The part of `core.Scheduler` that the balancer uses."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def worker(self) -> str:
        """The worker's name, the same in every session."""

    @property
    def blocks(self) -> BlockManager: ...

    @property
    def admits(self) -> bool:
        """Whether waiting groups may be given to this worker."""

    @property
    def answered_at(self) -> float: ...

    @property
    def steps_in_flight(self) -> SequenceOf[StepInFlight]:
        """The oldest first."""

    def room_for(self, group: SequenceGroup) -> int | None:
        """Tokens of a waiting group that are cached or being computed here; None if the next step has no room."""

    def has_adapter_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the worker holds the adapter, and can run it beside the running groups except `without`."""

    def seconds_to_copy(self, group: SequenceGroup) -> float:
        """Seconds that a step needs to copy the group's adapter to the device."""


class Member:
    """One worker, with the load that its scheduler reported last."""

    __slots__ = (
        "adapter_seconds",
        "backlog",
        "bit",
        "entry",
        "is_open",
        "num_seqs",
        "scheduler",
        "slot",
        "slowness",
        "speed",
    )

    def __init__(self, scheduler: WorkerScheduler, slot: int) -> None:
        self.scheduler = scheduler
        self.slot = slot
        self.bit = 1 << slot
        self.backlog = 0  # prompt tokens that no step computes yet
        self.num_seqs = 0
        self.is_open = False
        self.slowness = Slowness()
        self.speed = self.slowness.speed  # as of the last report
        self.entry = -1  # number of the current heap entry; others are stale
        self.adapter_seconds = ADAPTER_SECONDS  # expected seconds of a fetch

    @property
    def work(self) -> int:
        """Remaining work in tokens."""
        return self.backlog + SEQUENCE_TOKENS * self.num_seqs

    def brought_adapter(self, seconds: float) -> None:
        """Record an adapter's fetch. Adapters differ in size, so the mean changes by a quarter only."""
        self.adapter_seconds += (seconds - self.adapter_seconds) / 4
