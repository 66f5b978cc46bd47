"""A worker as the balancer sees it: the interface of its scheduler, and the figures of the scheduler's last report."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.step_times import Slowness

# Tokens that a running sequence is expected to compute from now on. In public traces about half of the sequences
# compute fewer tokens.
SEQUENCE_TOKENS = 128
# Seconds that a worker's first fetch of an adapter is expected to take. Fetching an adapter of rank 16 for 7 billion
# weights takes about 1 s over a fast network.
ADAPTER_SECONDS = 1.0


class StepInFlight(Protocol):
    """A step that its worker has not answered yet."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def planned_at(self) -> float: ...


class WorkerScheduler(Protocol):
    """The interface of a scheduler that the balancer uses; `core.Scheduler` implements it."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def worker(self) -> str:
        """The worker's name, which is the same in every session."""

    @property
    def blocks(self) -> BlockManager: ...

    @property
    def admits(self) -> bool:
        """Whether waiting groups may be given to this worker."""

    @property
    def answered_at(self) -> float:
        """The time of the worker's last answer to a step."""

    @property
    def steps_in_flight(self) -> SequenceOf[StepInFlight]:
        """The steps that the worker has not answered, the oldest first."""

    def room_for(self, group: SequenceGroup) -> int | None:
        """Number of a waiting group's tokens that this worker has cached or is computing; None if the next step has no
        room for the group."""

    def has_adapter_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the worker holds the group's adapter, and can run it together with the adapters of the running
        groups.

        Groups in `without` do not count as running.
        """

    def seconds_to_copy(self, group: SequenceGroup) -> float:
        """Seconds that a step needs to copy the group's adapter to the device; 0 if the adapter is on the device
        already."""


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
        self.backlog = 0  # Prompt tokens that no step computes yet.
        self.num_seqs = 0  # Running sequences.
        self.is_open = False  # Whether waiting groups are admitted.
        self.slowness = Slowness()
        self.speed = self.slowness.speed  # The worker's speed, as of the last report.
        self.entry = -1  # Number of this worker's current heap entry; its other entries are stale.
        self.adapter_seconds = ADAPTER_SECONDS  # Expected seconds to fetch an adapter.

    @property
    def work(self) -> int:
        """The worker's remaining work, in tokens."""
        return self.backlog + SEQUENCE_TOKENS * self.num_seqs

    def brought_adapter(self, seconds: float) -> None:
        """Record the seconds of an adapter's fetch. Adapters differ in size, so one fetch changes the mean by a quarter
        of the difference only."""
        self.adapter_seconds += (seconds - self.adapter_seconds) / 4
