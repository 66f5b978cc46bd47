"""The groups in one worker's session: how they are admitted, swapped, returned to the queue, and ended.

Other modules decide which group is admitted, swapped or preempted. `Session` is what a worker's planners share.
"""

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.prompt_item import WorkerItems
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ModelOutput, SchedulerOutput
from scheduler_service.core.placement.balancer import Balancer
from scheduler_service.core.placement.worker import Member
from scheduler_service.core.planning.adapters import Adapters
from scheduler_service.core.planning.encoder_cache import EncoderCache
from scheduler_service.core.queues.waiting_queue import WaitingQueue


class StepsInFlight:
    """The steps that a worker has not answered, the oldest first. `prompt_seconds`: duration of the last step of
    prompts alone. `answered_steps`, `answered_tokens`, `answered_seconds`: sums over the session's answered steps."""

    __slots__ = (
        "answered_at",
        "answered_seconds",
        "answered_steps",
        "answered_tokens",
        "outputs",
        "prompt_seconds",
    )

    def __init__(self) -> None:
        self.outputs: deque[SchedulerOutput] = deque()
        self.answered_at = float("-inf")
        self.answered_steps = self.answered_tokens = 0
        self.answered_seconds = 0.0
        self.prompt_seconds = 0.0

    @property
    def began_at(self) -> float:
        """Time when the worker could begin the oldest step: it had been sent, and the step before answered."""
        return max(self.outputs[0].planned_at, self.answered_at)

    @property
    def num_tokens(self) -> int:
        return sum(output.num_tokens for output in self.outputs)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Note that answers to steps in flight do not apply to these sequences."""
        for output in self.outputs:
            output.dropped.update(sequences)

    def answer(self, output: SchedulerOutput, answer: ModelOutput, now: float) -> float:
        """Remove the oldest step, and return its seconds. Raises ValueError if `answer` does not answer `output`."""
        if not self.outputs or self.outputs[0] is not output:
            raise ValueError(f"step {output.step_id} is not the oldest unanswered step")
        if answer.step_id != output.step_id:
            raise ValueError(f"the worker answered step {answer.step_id} instead of step {output.step_id}")
        if len(answer.num_tokens or answer.token_ids) != output.num_samples:
            raise ValueError(f"the worker returned {len(answer.token_ids)} tokens for {output.num_samples} samples")
        for numbers in (answer.num_draft_tokens, answer.num_draft_tokens_wanted):
            if numbers and len(numbers) != output.num_samples:
                raise ValueError(
                    f"the worker counted drafts of {len(numbers)} samples, and the step has {output.num_samples}"
                )
        seconds = now - self.began_at
        self.outputs.popleft()
        self.answered_at = now
        self.answered_steps += 1
        self.answered_tokens += output.num_tokens
        self.answered_seconds += seconds
        if output.prompts_began is not None:
            self.prompt_seconds = now - output.prompts_began
        return seconds


def groups_in(output: SchedulerOutput) -> dict[SequenceGroup, None]:
    """The groups that compute tokens in a step or have an image prepared, even if they have left the worker since."""
    return dict.fromkeys([*(sequence.group for sequence, _, _ in output.scheduled), *output.images_ahead.values()])


class WorkerGroups:
    """The running and swapped groups of one worker. `accused` are running groups that were in flight when a worker was
    lost."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        blocks: BlockManager,
        in_flight: StepsInFlight,
        adapters: Adapters,
        items: WorkerItems,
        encoder_cache: EncoderCache,
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._blocks = blocks
        self._in_flight = in_flight
        self._adapters = adapters
        self._items = items
        self._encoder_cache = encoder_cache
        self.running: dict[SequenceGroup, None] = {}  # in the order of admission
        self.num_running_seqs = 0  # counted as `SchedulingBudget` counts sequences
        self.swapped: OrderedDict[SequenceGroup, None] = OrderedDict()  # the first resumes first
        self.accused: dict[SequenceGroup, None] = {}
        self._by_id: dict[str, SequenceGroup] = {}  # running and swapped groups
        self._sequence_ids = itertools.count(1)
        self._finished: list[Sequence] = []  # not yet named to the worker
        self._preempted: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a group is on this worker, or the next step must tell the worker that a sequence left."""
        return bool(self.running or self.swapped or self._finished or self._preempted)

    @property
    def suspect(self) -> SequenceGroup | None:
        """The running suspect. At most one runs, because a suspect is admitted only if no other group runs."""
        return next((group for group in self.accused if group.is_suspect), None) if self.accused else None

    def find(self, request_id: str) -> SequenceGroup | None:
        return self._by_id.get(request_id) or self._waiting.get(request_id)

    def new_sequence_id(self) -> int:
        return next(self._sequence_ids)

    def departures(self) -> tuple[list[int], list[int]]:
        """Ids of finished and of preempted sequences that the worker still knows; each is returned once."""
        departures = [sequence.id for sequence in self._finished], self._preempted
        for sequence in self._finished:
            sequence.is_known = False
        self._finished, self._preempted = [], []
        return departures

    # ---- admission, swaps and returns

    def admit(self, group: SequenceGroup) -> None:
        self._waiting.remove(group.request_id)
        if group.encoder is not None:
            group.encoder.id = self.new_sequence_id()
        for sequence in group.live:
            sequence.id = self.new_sequence_id()
            sequence.max_num_tokens = group.max_num_tokens(self._blocks.max_sequence_tokens)
        self._blocks.allocate(group.live[0])
        if group.adapter_id:
            self._adapters.came(group.adapter_id)
        self._start_running(group)
        self._by_id[group.request_id] = group

    def swap_out(self, group: SequenceGroup, now: float) -> list[tuple[int, int]]:
        """Swap out a running group, which resumes first. Returns the pairs of device and host block to copy."""
        pairs = self._blocks.swap_out(group)
        self._encoder_cache.release(group.live)
        self._stop_running(group)
        self.swapped[group] = None
        self.swapped.move_to_end(group, last=False)
        group.placement.swapped_at = now
        for sequence in group.live:
            sequence.status = SequenceStatus.SWAPPED
        return pairs

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Resume a swapped group. Returns the pairs of host and device block to copy."""
        pairs = self._blocks.swap_in(group)
        del self.swapped[group]
        self._start_running(group)
        return pairs

    def give_back(self, group: SequenceGroup) -> None:
        self._preempted.extend(sequence.id for sequence in group.with_tables if sequence.is_known)
        self._release(group)
        self._waiting.put_back([group])

    def give_all_back(self) -> list[SequenceGroup]:
        groups = [*self.running, *self.swapped]
        for group in groups:
            self._release(group)
        self._waiting.put_back(groups)
        return groups

    def _release(self, group: SequenceGroup) -> None:
        self._forget(group)
        self._in_flight.drop(group.with_tables)
        self._encoder_cache.release(group.live)
        for sequence in group.with_tables:
            self._blocks.free(sequence)
            sequence.leave_worker()
        group.has_unforked = len(group.sequences) > 1

    def _forget(self, group: SequenceGroup) -> None:
        if group in self.running:
            self._stop_running(group)
        self.swapped.pop(group, None)
        if group.adapter_id:
            self._adapters.left(group.adapter_id)
        self._items.release(group)
        del self._by_id[group.request_id]

    def _start_running(self, group: SequenceGroup) -> None:
        for sequence in group.live:
            sequence.status = SequenceStatus.RUNNING
        self.running[group] = None
        self.num_running_seqs += group.num_seqs
        if group.adapter_id:
            self._adapters.started(group.adapter_id)
        if group.suspicion is not None:
            self.accused[group] = None

    def _stop_running(self, group: SequenceGroup) -> None:
        del self.running[group]
        self.accused.pop(group, None)
        self.num_running_seqs -= group.num_seqs
        if group.adapter_id:
            self._adapters.stopped(group.adapter_id)

    # ---- ends of sequences

    def finish_sequence(self, sequence: Sequence, status: SequenceStatus) -> None:
        if sequence.status.is_finished:
            return
        group = sequence.group
        if sequence.status is SequenceStatus.RUNNING and group.beams is None:
            self.num_running_seqs -= 1
        sequence.status = status
        self._leave_worker(sequence)
        if group.is_finished:
            if group.encoder is not None:
                self._leave_worker(group.encoder)
            if group.request_id in self._by_id:
                self._forget(group)
            self._waiting.end(group.request_id)
            if group.adapter_id:
                self._adapters.ended()

    def _leave_worker(self, sequence: Sequence) -> None:
        self._blocks.free(sequence)
        self._encoder_cache.release([sequence])
        if sequence.is_known:
            self._finished.append(sequence)

    def finish(self, group: SequenceGroup, status: SequenceStatus, error: str | None = None) -> None:
        if error is not None:
            group.error = error
        for sequence in group.live:
            self.finish_sequence(sequence, status)

    def ignore(self, group: SequenceGroup) -> None:
        config = self._config
        if group.largest_image > (most := config.max_image_tokens):
            limit = f"the worker's encoder cache has room for {most}"
            if most < config.encoder_cache_size:
                limit = f"a step computes it whole, and has at most {most} beside other requests' tokens"
            error = f"an image of the request has {group.largest_image} tokens; {limit}"
            self.finish(group, SequenceStatus.FINISHED_IGNORED, error)
            return
        error = (
            f"the request's {group.num_seqs} sequence(s) of up to "
            f"{group.max_num_tokens(self._blocks.max_sequence_tokens)} tokens"
            f"{_with_encoder(group)} do not fit the worker, which has "
            f"{config.num_device_blocks} blocks of {config.block_size} tokens"
            f"{' or of the states of a sequence' if config.has_states else ''} and "
            f"{config.max_num_seqs} sequences; ask for fewer or shorter outputs"
        )
        self.finish(group, SequenceStatus.FINISHED_IGNORED, error)


def _with_encoder(group: SequenceGroup) -> str:
    return f" and {group.num_encoder_tokens} encoder tokens" if group.encoder is not None else ""


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a worker. The schedulers of all workers share `waiting` and `balancer`."""

    config: SchedulerConfig
    worker: str
    waiting: WaitingQueue
    balancer: Balancer
    member: Member
    blocks: BlockManager
    in_flight: StepsInFlight
    adapters: Adapters
    items: WorkerItems
    encoder_cache: EncoderCache
    groups: WorkerGroups
