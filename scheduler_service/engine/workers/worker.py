"""The state of one worker, over all its sessions, and its scheduler during a session."""

import asyncio
import enum
from collections import Counter, deque
from collections.abc import Iterable

from scheduler_service.core import ModelOutput, Scheduler, SchedulerOutput
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.step_split import StepSplit
from scheduler_service.engine.workers.fetch_counts import FetchCounts
from scheduler_service.statistics.counts import STEP_BOUNDS, Histogram

_FEATURE = "speculate:"
MAX_NAME = 16
"""Maximum number of characters of a proposer's name, which becomes a metrics label."""


class Drafts:
    """Counts of the drafts of one worker."""

    def __init__(self) -> None:
        self.proposer = ""
        self.verified = Lengths()
        self.right = Lengths()

    def take(self, answer: ModelOutput) -> None:
        """Add the draft counts of an answer."""
        if any(answer.num_draft_tokens):
            self.verified.count(filter(None, answer.num_draft_tokens))
            self.right.count(number - 1 for number in answer.num_tokens if number > 1)  # 0: its form is still parsed


def proposer_of(features: Iterable[str]) -> str:
    """The name of the worker's proposer, from the features that the worker reports. The name is empty if the worker
    does not propose drafts.
    """
    named = (feature.removeprefix(_FEATURE) for feature in features if feature.startswith(_FEATURE))
    return next((name[:MAX_NAME] for name in named if name.replace("_", "").isalnum()), "")


class Lengths:
    """For each number of consecutive drafts, how often a sequence had this number in a step."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, lengths: Iterable[int]) -> None:
        self._counts.update(lengths)

    @property
    def num_tokens(self) -> int:
        return sum(length * count for length, count in self._counts.items())

    def by_position(self) -> list[int]:
        """Number of drafts at the first position after the last token, at the second position, and so on."""
        longest = max(self._counts, default=0)
        return [sum(n for length, n in self._counts.items() if length > place) for place in range(longest)]


class WorkerStatus(enum.StrEnum):
    """The status of a worker."""

    CONNECTING = enum.auto()
    """No session is open, and the worker's loop tries to connect. `last_error` contains the reason."""
    SERVING = enum.auto()
    DRAINING = enum.auto()
    """The worker finishes its requests and receives no new requests."""
    DRAINED = enum.auto()
    """An operator has drained the worker, its requests have ended, and no session is open."""
    SUPERSEDED = enum.auto()
    """Another scheduler has a session with the worker. This scheduler waits until the other scheduler's session ends.
    """


class Worker:
    """The state of one worker. At most `most_in_flight` steps are sent ahead of their answers."""

    def __init__(self, client: WorkerClient, most_in_flight: int) -> None:
        self.client = client
        self.scheduler: Scheduler | None = None
        self.epoch = 0
        self.num_steps = 0
        self.split = StepSplit()  # Sum over all sessions.
        self.step_tokens = Histogram(STEP_BOUNDS)  # Number of tokens of each step, over all sessions.
        self.num_preemptions = 0  # Number of preemptions in earlier sessions.
        self.num_losses = 0  # Number of sessions that ended without a drain.
        self.fetch_counts = FetchCounts()  # Sum over all sessions.
        self.drafts = Drafts()  # Sum over all sessions.
        self.is_wanted = True
        """Whether the worker's loop connects again after the current session."""
        self.last_error = "not connected yet"
        self.instance_id = ""
        self.in_flight: deque[SchedulerOutput] = deque()
        """Steps that were sent and are not answered."""
        self.woken = asyncio.Event()
        """An event that makes the worker's loop check whether a step can be sent."""
        self.is_leaving = False
        """Whether the worker has reported that it shuts down."""
        self.is_superseded = False
        self.undrained = asyncio.Event()
        self.undrained.set()
        self.drained_by = float("inf")
        """Time at which the requests that remain after an operator's drain move to other workers."""
        self._most_in_flight = most_in_flight

    @property
    def draining(self) -> bool:
        """Whether the worker receives no new requests, because it shuts down or an operator has drained it."""
        return self.is_leaving or not self.undrained.is_set()

    @property
    def admits(self) -> bool:
        """Whether the worker accepts requests."""
        return self.scheduler is not None and not self.draining

    @property
    def state(self) -> WorkerStatus:
        if self.draining:
            return WorkerStatus.DRAINED if self.scheduler is None else WorkerStatus.DRAINING
        if self.scheduler is not None:
            return WorkerStatus.SERVING
        return WorkerStatus.SUPERSEDED if self.is_superseded else WorkerStatus.CONNECTING

    @property
    def may_send(self) -> bool:
        """Whether another step may be sent ahead of its answer."""
        return len(self.in_flight) < self._most_in_flight

    def wake(self) -> None:
        """Have the worker's loop check whether a step can be sent. The call has no effect while the maximum number of
        steps is in flight.
        """
        if self.may_send:
            self.woken.set()
