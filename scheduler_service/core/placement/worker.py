"""A worker as the balancer knows it: what its scheduler answers, and what that scheduler reported last."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.step_times import Slowness

# What a running sequence goes on for, in tokens: about half of those of public traces stop before this.
SEQUENCE_TOKENS = 128
# Until one has been brought to the worker: about an adapter of rank 16 for 7 billion weights over a fast network.
ADAPTER_SECONDS = 1.0


class StepInFlight(Protocol):
    """A step that its worker has not answered."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def planned_at(self) -> float: ...


class WorkerScheduler(Protocol):
    """The scheduler of a worker's session, as far as it is asked; `core.Scheduler` is one."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def worker(self) -> str:
        """The worker's name: the same one in every session."""

    @property
    def blocks(self) -> BlockManager: ...

    @property
    def admits(self) -> bool:
        """Whether waiting groups may be given to the worker."""

    @property
    def answered_at(self) -> float:
        """When the last answer came."""

    @property
    def steps_in_flight(self) -> SequenceOf[StepInFlight]:
        """The steps without an answer, the oldest first."""

    def room_for(self, group: SequenceGroup) -> int | None:
        """Tokens that a waiting group would find, cached or being computed; None if the next step could not take it."""

    def has_adapter_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the group's adapter is held and has a slot, `without` the groups that would make room."""

    def seconds_to_copy(self, group: SequenceGroup) -> float:
        """Seconds that the first step with the group's adapter takes longer, if the adapter is not on the device."""


class Member:
    """One worker, as its scheduler reported it last."""

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
        self.backlog = 0  # prompt tokens under way, not computed by any step yet
        self.num_seqs = 0  # that run
        self.is_open = False  # for waiting groups
        self.slowness = Slowness()
        self.speed = self.slowness.speed  # that its work is counted with
        self.entry = -1  # in the heap that counts; the others are stale
        self.adapter_seconds = ADAPTER_SECONDS  # that bringing an adapter takes

    @property
    def work(self) -> int:
        """In tokens."""
        return self.backlog + SEQUENCE_TOKENS * self.num_seqs

    def brought_adapter(self, seconds: float) -> None:
        """An adapter was brought to the worker; they differ in size, so the mean follows slowly."""
        self.adapter_seconds += (seconds - self.adapter_seconds) / 4
