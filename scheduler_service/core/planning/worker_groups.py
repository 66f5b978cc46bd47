"""The groups in one worker's session: how they are admitted, swapped, returned to the queue, and ended.

A group runs on this worker, is swapped out on this worker, or waits in the shared queue. If a sequence ends for any
reason, its blocks are freed. Other modules decide which group is admitted, swapped or preempted.

`StepsInFlight` contains the steps that the worker has not answered. `Session` contains everything that the planners of
a worker share.
"""

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ModelOutput, SchedulerOutput
from scheduler_service.core.placement.balancer import Balancer
from scheduler_service.core.placement.worker import Member
from scheduler_service.core.planning.adapters import Adapters
from scheduler_service.core.queues.waiting_queue import WaitingQueue


class StepsInFlight:
    """The steps that a worker received and has not answered, and the time of its last answer.

    `outputs` are the steps that the worker has not answered, the oldest first. `prompt_seconds` is the duration of the
    last step that computed only prompts.
    """

    __slots__ = ("answered_at", "outputs", "prompt_seconds")

    def __init__(self) -> None:
        self.outputs: deque[SchedulerOutput] = deque()
        self.answered_at = float("-inf")
        self.prompt_seconds = 0.0

    @property
    def began_at(self) -> float:
        """The time when the worker could begin the oldest step in flight: this step had been sent, and the step before
        had been answered."""
        return max(self.outputs[0].planned_at, self.answered_at)

    @property
    def num_tokens(self) -> int:
        return sum(output.num_tokens for output in self.outputs)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Note that sequences leave the worker, so that answers to steps in flight do not apply to them."""
        for output in self.outputs:
            output.dropped.update(sequences)

    def answer(self, output: SchedulerOutput, answer: ModelOutput, now: float) -> float:
        """Remove the oldest step in flight, and return its duration in seconds. Raises ValueError if `answer` does not
        answer the step `output`."""
        if not self.outputs or self.outputs[0] is not output:
            raise ValueError(f"step {output.step_id} is not the oldest without an answer")
        if answer.step_id != output.step_id:
            raise ValueError(f"the worker answered step {answer.step_id} instead of step {output.step_id}")
        if len(answer.num_tokens or answer.token_ids) != output.num_samples:
            raise ValueError(f"the worker returned {len(answer.token_ids)} tokens for {output.num_samples} samples")
        for numbers in (answer.num_draft_tokens, answer.num_draft_tokens_wanted):
            if numbers and len(numbers) != output.num_samples:
                raise ValueError(f"the worker counted drafts of {len(numbers)} samples of {output.num_samples}")
        seconds = now - self.began_at
        self.outputs.popleft()
        self.answered_at = now
        if output.prompts_began is not None:
            self.prompt_seconds = now - output.prompts_began
        return seconds


def groups_in(output: SchedulerOutput) -> dict[SequenceGroup, None]:
    """The groups that compute tokens in a step, including groups that have left the worker since the step was
    planned."""
    return dict.fromkeys(sequence.group for sequence, _, _ in output.scheduled)


class WorkerGroups:
    """The running and swapped groups of one worker, and the sequences that left since the last step was sent.

    `running` is in the order of admission. The first group of `swapped` resumes first. `accused` contains the running
    groups that were in flight when a worker was lost.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        blocks: BlockManager,
        in_flight: StepsInFlight,
        adapters: Adapters,
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._blocks = blocks
        self._in_flight = in_flight
        self._adapters = adapters
        self.running: dict[SequenceGroup, None] = {}
        self.num_running_seqs = 0  # sequences of all running groups, counted as in a budget
        self.swapped: OrderedDict[SequenceGroup, None] = OrderedDict()
        self.accused: dict[SequenceGroup, None] = {}
        self._by_id: dict[str, SequenceGroup] = {}  # running and swapped groups
        self._sequence_ids = itertools.count(1)
        self._finished: list[Sequence] = []  # finished sequences that no step has named to the worker yet
        self._preempted: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a group runs or is swapped out on this worker, or the next step must tell the worker that a sequence
        left."""
        return bool(self.running or self.swapped or self._finished or self._preempted)

    @property
    def suspect(self) -> SequenceGroup | None:
        """The running suspect, which is scheduled alone; None if no suspect runs. At most one suspect runs, because a
        suspect is admitted only if no other group runs."""
        return next((group for group in self.accused if group.is_suspect), None) if self.accused else None

    def find(self, request_id: str) -> SequenceGroup | None:
        """The group with this id, if it is on this worker or waits."""
        return self._by_id.get(request_id) or self._waiting.get(request_id)

    def new_sequence_id(self) -> int:
        return next(self._sequence_ids)

    def departures(self) -> tuple[list[int], list[int]]:
        """Ids of finished sequences and of preempted sequences that the worker still knows. Each id is returned by one
        call only."""
        departures = [sequence.id for sequence in self._finished], self._preempted
        for sequence in self._finished:
            sequence.is_known = False
        self._finished, self._preempted = [], []
        return departures

    # ---- admission, swaps and returns

    def admit(self, group: SequenceGroup) -> None:
        """Take a waiting group out of the queue, and start to run it."""
        self._waiting.remove(group.request_id)
        if group.encoder is not None:
            group.encoder.id = self.new_sequence_id()
        for sequence in group.live:
            sequence.id = self.new_sequence_id()
            sequence.max_num_tokens = group.max_num_tokens(self._blocks.sizes.max_sequence_tokens)
        self._blocks.allocate(group.live[0])
        self._adapters.came(group)
        self._start_running(group)
        self._by_id[group.request_id] = group

    def swap_out(self, group: SequenceGroup, now: float) -> list[tuple[int, int]]:
        """Swap out a running group, and place it first among the swapped groups. Returns the pairs of device block and
        host block to copy."""
        pairs = self._blocks.swap_out(group)
        self._stop_running(group)
        self.swapped[group] = None
        self.swapped.move_to_end(group, last=False)
        group.placement.swapped_at = now
        for sequence in group.live:
            sequence.status = SequenceStatus.SWAPPED
        return pairs

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Resume a swapped group. Returns the pairs of host block and device block to copy."""
        pairs = self._blocks.swap_in(group)
        del self.swapped[group]
        self._start_running(group)
        return pairs

    def give_back(self, group: SequenceGroup) -> None:
        """Return a group to the head of the queue. The group will be new to the worker that takes it next."""
        self._preempted.extend(sequence.id for sequence in group.with_tables if sequence.is_known)
        self._release(group)
        self._waiting.put_back([group])

    def give_all_back(self) -> list[SequenceGroup]:
        """Return all groups to the head of the queue, because the worker is gone."""
        groups = [*self.running, *self.swapped]
        for group in groups:
            self._release(group)
        self._waiting.put_back(groups)
        return groups

    def _release(self, group: SequenceGroup) -> None:
        self._forget(group)
        self._in_flight.drop(group.with_tables)
        for sequence in group.with_tables:
            self._blocks.free(sequence)
            sequence.leave_worker()
        group.has_unforked = len(group.sequences) > 1

    def _forget(self, group: SequenceGroup) -> None:
        if group in self.running:
            self._stop_running(group)
        self.swapped.pop(group, None)
        self._adapters.left(group)
        del self._by_id[group.request_id]

    def _start_running(self, group: SequenceGroup) -> None:
        for sequence in group.live:
            sequence.status = SequenceStatus.RUNNING
        self.running[group] = None
        self.num_running_seqs += group.num_seqs
        self._adapters.started(group)
        if group.suspicion is not None:
            self.accused[group] = None

    def _stop_running(self, group: SequenceGroup) -> None:
        del self.running[group]
        self.accused.pop(group, None)
        self.num_running_seqs -= group.num_seqs
        self._adapters.stopped(group)

    # ---- ends of sequences

    def finish_sequence(self, sequence: Sequence, status: SequenceStatus) -> None:
        """End one sequence and free its blocks. Does nothing if the sequence has ended already."""
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
            self._adapters.ended()

    def _leave_worker(self, sequence: Sequence) -> None:
        self._blocks.free(sequence)
        if sequence.is_known:
            self._finished.append(sequence)

    def finish(self, group: SequenceGroup, status: SequenceStatus, error: str | None = None) -> None:
        """End all sequences of a group that is on this worker or waits. `error` is a sentence for the client."""
        if error is not None:
            group.error = error
        for sequence in group.live:
            self.finish_sequence(sequence, status)

    def ignore(self, group: SequenceGroup) -> None:
        """End a group that does not fit the worker, with an error for the client."""
        config = self._config
        error = (
            f"the request's {group.num_seqs} sequence(s) of up to "
            f"{group.max_num_tokens(self._blocks.sizes.max_sequence_tokens)} tokens"
            f"{_with_encoder(group)} do not fit the worker, which has "
            f"{config.num_device_blocks} blocks of {config.block_size} tokens and "
            f"{config.max_num_seqs} sequences; ask for fewer or shorter outputs"
        )
        self.finish(group, SequenceStatus.FINISHED_IGNORED, error)


def _with_encoder(group: SequenceGroup) -> str:
    return f" and the {group.num_encoder_tokens} that their encoder reads" if group.encoder is not None else ""


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a worker, from its first step to its loss.

    The schedulers of all workers share `waiting` and `balancer`. All other fields of a `Session` belong to its worker
    only.
    """

    config: SchedulerConfig
    worker: str
    waiting: WaitingQueue
    balancer: Balancer
    member: Member
    blocks: BlockManager
    in_flight: StepsInFlight
    adapters: Adapters
    groups: WorkerGroups
