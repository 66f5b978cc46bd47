"""The state of each worker over all its sessions, and outages: no worker accepts requests.

In a short outage requests wait and the health stays SERVING, because load balancers would otherwise send no calls.
"""

import asyncio
import enum
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import grpc
import structlog

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import ModelOutput, Scheduler, SchedulerOutput, SequenceStatus, WorkerScheduler
from scheduler_service.core.planning.encoder_cache import EncoderCounts
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.session import StepSplit
from scheduler_service.statistics.counts import STEP_BOUNDS, Histogram

log = structlog.get_logger()

_FEATURE = "speculate:"
MAX_NAME = 16
"""Characters of a proposer's name, which is a metrics label."""
MAX_WORKERS = 3
UNSERVED_SECONDS = 2.5
"""Seconds without a worker after which a shutdown stops waiting. Attempts to connect are at most 2 s apart."""


class Drafts:
    def __init__(self) -> None:
        self.proposer = ""
        self.verified = Lengths()
        self.right = Lengths()

    def take(self, answer: ModelOutput) -> None:
        if any(answer.num_draft_tokens):
            self.verified.count(filter(None, answer.num_draft_tokens))
            self.right.count(number - 1 for number in answer.num_tokens if number > 1)  # 0: its form is still parsed


def proposer_of(features: Iterable[str]) -> str:
    """The worker's proposer, or an empty text if the worker does not propose drafts."""
    named = (feature.removeprefix(_FEATURE) for feature in features if feature.startswith(_FEATURE))
    return next((name[:MAX_NAME] for name in named if name.replace("_", "").isalnum()), "")


class Lengths:
    """How often a sequence had each number of consecutive drafts in a step."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, lengths: Iterable[int]) -> None:
        self._counts.update(lengths)

    @property
    def num_tokens(self) -> int:
        return sum(length * count for length, count in self._counts.items())

    def by_position(self) -> list[int]:
        """Drafts at the first position after the last token, at the second, and so on."""
        longest = max(self._counts, default=0)
        return [sum(n for length, n in self._counts.items() if length > place) for place in range(longest)]


@dataclass(slots=True)
class FetchCounts:
    num_adapters: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class WorkerStatus(enum.StrEnum):
    CONNECTING = enum.auto()
    """No session is open; `last_error` is the reason."""
    SERVING = enum.auto()
    DRAINING = enum.auto()
    """The worker finishes its requests and receives no new ones."""
    DRAINED = enum.auto()
    """No requests and no session are left."""
    SUPERSEDED = enum.auto()
    """Another scheduler has a session with the worker."""


class Worker:
    """One worker. At most `most_in_flight` steps are sent ahead of their answers."""

    def __init__(self, client: WorkerClient, most_in_flight: int) -> None:
        self.client = client
        self.scheduler: Scheduler | None = None
        self.epoch = 0
        self.num_steps = 0
        self.split = StepSplit()
        self.step_tokens = Histogram(STEP_BOUNDS)  # tokens of each step
        self.num_preemptions = 0  # without the open session
        self.past_encoder_counts = EncoderCounts()  # without the open session
        self.num_losses = 0  # sessions that ended without a drain
        self.fetch_counts = FetchCounts()
        self.drafts = Drafts()
        self.is_wanted = True
        self.last_error = "not connected yet"
        self.instance_id = ""
        self.in_flight: deque[SchedulerOutput] = deque()
        self.answered = asyncio.Event()
        """Set by each answer."""
        self.woken = asyncio.Event()
        """Set if it may be possible to send a step."""
        self.is_leaving = False
        self.is_superseded = False
        self.undrained = asyncio.Event()
        self.undrained.set()
        self.drained_by = float("inf")
        """Time at which requests that remain after an operator's drain move to other workers."""
        self._most_in_flight = most_in_flight

    @property
    def encoder_counts(self) -> EncoderCounts:
        scheduler, counts = self.scheduler, self.past_encoder_counts
        return counts if scheduler is None else counts + scheduler.encoder_cache.counts

    @property
    def draining(self) -> bool:
        """Whether the worker receives no new requests: it shuts down, or an operator drained it."""
        return self.is_leaving or not self.undrained.is_set()

    @property
    def admits(self) -> bool:
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
        return len(self.in_flight) < self._most_in_flight

    def wake(self) -> None:
        if self.may_send:
            self.woken.set()


class Outage:
    """Whether an outage lasts. The server starts in an outage, until the first worker accepts requests."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._began, self._ended = asyncio.Event(), asyncio.Event()
        self._began.set()

    @property
    def is_on(self) -> bool:
        return self._began.is_set()

    def set(self, is_on: bool) -> None:
        if is_on == self.is_on:
            return
        begins, ends = (self._began, self._ended) if is_on else (self._ended, self._began)
        begins.set()
        ends.clear()

    async def watch_health(self, patience: float | None = None) -> AsyncIterator[bool]:
        """Yield whether clients should use this server: True as soon as a worker serves, then each change.

        `patience`: seconds after which an outage shows; by default those that requests wait.
        """
        while True:
            await self._ended.wait()
            yield True
            while await self._ends_in_time(self._patience if patience is None else patience):
                pass
            yield False

    async def lasts(self, seconds: float) -> None:
        """Return when an outage has lasted for `seconds`, counted from this call or from a later begin."""
        while await self._ends_in_time(seconds):
            pass

    async def _ends_in_time(self, seconds: float) -> bool:
        """Returns whether the next outage ends within `seconds`."""
        await self._began.wait()
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True


@dataclass(slots=True)
class Departed:
    """Sums over workers that have left, without which the totals would fall."""

    num_losses: int = 0
    num_preemptions: int = 0
    num_steps: int = 0

    def add(self, worker: Worker) -> None:
        self.num_losses += worker.num_losses
        self.num_preemptions += worker.num_preemptions
        self.num_steps += worker.num_steps


class Workers:
    """Known workers, connected or not. A request waits at most `patience` seconds for a worker."""

    def __init__(self, targets: Sequence[str], patience: float) -> None:
        self._targets = targets
        self._by_address: dict[str, Worker] = {}
        self.serving: dict[WorkerScheduler, Worker] = {}
        """Workers with an open session."""
        self.departed = Departed()
        self.outage = Outage(patience)
        """On while no worker accepts requests."""
        self.absence = Outage(UNSERVED_SECONDS)
        """On while no worker has a session."""

    @property
    def all(self) -> list[Worker]:
        return list(self._by_address.values())

    def add(self, worker: Worker) -> None:
        self._by_address[worker.client.address] = worker

    def remove(self, worker: Worker) -> None:
        del self._by_address[worker.client.address]

    def find(self, address: str) -> Worker:
        """Raises NOT_FOUND."""
        if (worker := self._by_address.get(address)) is None:
            known = ", ".join(sorted(self._by_address)) or "none"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"there is no worker {address!r}; known: {known}")
        return worker

    @property
    def admits(self) -> bool:
        return any(worker.admits for worker in self._by_address.values())

    def note_change(self) -> None:
        self.outage.set(not self.admits)
        self.absence.set(not self.serving)

    def why_unserved(self) -> str:
        if not self._by_address:
            return f"none is found at {', '.join(self._targets)}"
        workers = self.all
        reasons = [
            f"{worker.client.address}: {'it is drained or shuts down' if worker.draining else worker.last_error}"
            for worker in workers[:MAX_WORKERS]
        ]
        left = len(workers) - len(reasons)
        return "; ".join([*reasons, *([f"and {left} more"] if left else [])])

    # ---- the workers' schedulers

    @property
    def schedulers(self) -> list[Scheduler]:
        return [worker.scheduler for worker in self._by_address.values() if worker.scheduler is not None]

    def wake(self) -> None:
        for worker in self._by_address.values():
            worker.wake()

    def wake_for(self, output: SchedulerOutput) -> None:
        """Wake the workers to which another worker's step has left requests."""
        for placement in (*output.moved, *output.placements):
            if placement.to is not None:
                self.serving[placement.to].wake()

    def finish(self, request_id: str, status: SequenceStatus) -> bool:
        """Returns whether any session contained the request."""
        return any(scheduler.finish_requests([request_id], status) for scheduler in self.schedulers)

    def reset_prefix_cache(self) -> int:
        """Returns the number of blocks that were cached. Requests in flight continue."""
        num_blocks = sum(scheduler.reset_prefix_cache() for scheduler in self.schedulers)
        log.info("prefix cache emptied by an operator", blocks=num_blocks)
        return num_blocks
