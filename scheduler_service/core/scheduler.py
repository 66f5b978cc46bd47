"""Plans the steps of one worker.

There is no prefill phase and no decode phase. In each step, a sequence computes as many of its uncomputed tokens as the
step's budget allows. Sequences that need a single token are scheduled first, so that a long prompt never delays these
sequences. After these sequences, prompts under way are scheduled, and then swapped groups. Waiting groups are scheduled
last, after all swapped groups that have an adapter slot have resumed. A waiting group goes before a swapped group only
if the waiting group outranks it.

A long prompt first computes at most `max_prefill_chunk` tokens, so that later requests join the step too. The rest of
the step's budget goes to long prompts, so that a prompt without competing requests is computed as fast as possible.
Long prompts receive these tokens in the order of scheduling.

If blocks run out, the queue's policy chooses the group that is preempted: the group that was admitted last, or the
group that ranks last. In a step, all swaps from the device to the host are planned before any swap back. The worker
copies swapped blocks in the order in which the swaps are planned.

Steps can be planned before earlier steps are answered. The worker does steps in order and feeds its sampled tokens into
the next step, so planning requires only the number of tokens. Blocks that are freed while steps are in flight can be
reused at once, because their next sequence writes to them in a later step. If a sequence turns out to have stopped,
only its slots in the steps in flight are wasted.

If the worker proposes drafts, the scheduler reserves draft tokens after each sequence's next token, until the step's
token budget is used up. The worker proposes and verifies the drafts. The worker's answer reports how many drafts of
each sequence were accepted. Until a step is answered, later plans assume that all drafts of this step are accepted.

`planning/step.py` explains the contents of a step, and how its bytes are counted. `planning/steady_plan.py` explains
steps that repeat the step before. `planning/shared_prefixes.py` explains requests that wait for a prefix which other
requests compute. `planning/running.py` explains room for drafts. `suspects/turns.py` explains separate steps for
requests that may cause the loss of workers.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import PhaseRule, PreemptionMode, SchedulerConfig
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ModelOutput, SchedulerOutput, SequenceOutput
from scheduler_service.core.placement.worker import Member
from scheduler_service.core.planning.adapters import AdapterFetch, Adapters
from scheduler_service.core.planning.answers import Answers
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.planning.queue_view import QueueView
from scheduler_service.core.planning.running import ChunkSizes, DraftRoom, RunningPlanner
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.steady_plan import SteadyPlan
from scheduler_service.core.planning.step import Step
from scheduler_service.core.planning.step_writer import StepWriter
from scheduler_service.core.planning.swapped import SwappedPlanner
from scheduler_service.core.planning.waiting import WaitingPlanner
from scheduler_service.core.planning.worker_groups import Session, StepsInFlight, WorkerGroups
from scheduler_service.core.queues.waiting_queue import WaitingQueue
from scheduler_service.core.suspects.evidence import Evidence
from scheduler_service.core.suspects.turns import SuspectTurns


class Scheduler:
    """Plans the steps of one worker's session.

    The caller passes the worker's answers to `update_from_output`, in the order of the steps. An empty step has no
    answer. The caller decides how many steps are planned ahead of the answers. `finish_requests` and `finish_sequence`
    can be called at any time. Blocks of finished requests are freed at once, which is safe because the worker does
    steps in order.

    `worker` is the worker's name, which is the same in every session. `now` is the time when the session begins.
    """

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, worker: str = "", now: float = 0.0) -> None:
        self.config = config
        self.worker = worker
        self.waiting = waiting
        self.balancer = balancer = waiting.balancer
        self.member = balancer.join(self)
        try:
            self.blocks = _blocks(config, self.member, waiting)
        except BaseException:  # for example MemoryError
            balancer.leave(self.member)
            raise
        self._in_flight = StepsInFlight()
        self.adapters = Adapters(
            config.max_loras, config.max_held_loras, waiting.live_adapters, balancer.adapter_directory, self.member.bit
        )
        self._groups = WorkerGroups(config, waiting, self.blocks, self._in_flight, self.adapters)
        session = Session(
            config, worker, waiting, balancer, self.member, self.blocks, self._in_flight, self.adapters, self._groups
        )
        chunk_sizes = ChunkSizes(session)
        prefixes = SharedPrefixes(session)
        self._preemption = Preemption(session, prefixes)
        self._running = RunningPlanner(session, chunk_sizes, self._preemption, prefixes)
        self._admission = WaitingPlanner(session, chunk_sizes, self._preemption, prefixes)
        self._swapped = SwappedPlanner(session, self._running, self._admission)
        self._steady = SteadyPlan(session, self._admission)
        self._draft_room = DraftRoom(session)
        self._suspects = SuspectTurns(session, self._running, self._admission)
        self._writer = StepWriter(session)
        self._evidence = Evidence(session)
        self._answers = Answers(session)
        self.running = self._groups.running  # Running groups in the order of admission.
        self.swapped = self._groups.swapped  # The first swapped group resumes first.
        self.num_preemptions = self._preemption.counts
        self._evidence.join(now)

    # ---- planning

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step. `now` is the time in seconds of any monotonic clock.

        The time `now` matters only with a delay factor or with several workers. An empty step has no step id and need
        not be sent. A step is empty if there is no work, or if all work must wait for a worker's answer or is left to
        other workers. If there is no work at all, `schedule` changes nothing.
        """
        if not self.has_work:
            return self._writer.write_nothing()
        step = Step(self.config, QueueView(self.waiting, self.worker), now)
        suspect = self._suspects.next(step)
        if suspect is not None and self._in_flight.outputs:
            return self._writer.write_nothing(step)
        if self.config.sliding_window:
            self._release_behind_window()
        if suspect is not None or not self._steady.repeat(step):
            step.budget.take(num_seqs=self._groups.num_running_seqs)
            if suspect is None or not self._suspects.schedule(suspect, step):
                self._schedule_all(step)
        self._running.hand_out_rest(step)
        if self._admission.schedule_sharing(step):
            self._running.hand_out_rest(step)
        if self.config.num_lookahead_slots:
            self._draft_room.hand_out(step)
        output = self._writer.write(step)
        self._steady.look_ahead(step)
        self._admission.report(step)
        self.adapters.planned()
        return output

    def _schedule_all(self, step: Step) -> None:
        if self.config.phase_rule is PhaseRule.CHUNKED:
            self._schedule_together(step)
        else:
            self._schedule_separately(step)

    def _schedule_together(self, step: Step) -> None:
        ready, behind = self._running.split(step)
        self._running.schedule(ready, step)
        self._running.schedule(behind, step)
        if self.swapped:
            self._admission.schedule(step)
            self._swapped.schedule(step)
        self._admission.schedule(step)

    def _schedule_separately(self, step: Step) -> None:
        """Plan prompts under way, then swapped groups, then waiting groups. If the step has no prompt, plan decodes.

        A group that was swapped out before its prompt was computed resumes in a step that has only prompts. Any other
        swapped group resumes in a step that has only decodes.
        """
        ready, behind = self._running.split(step)
        self._running.schedule(behind, step)
        if self.swapped:
            if self._admission.is_time(step.now):
                self._admission.schedule(step)
            self._swapped.schedule(step, are_behind=True)
        if self._admission.is_time(step.now):
            self._admission.schedule(step)
        if step.chunks:
            step.prompts_began = step.now
            return
        self._running.schedule(ready, step)
        self._swapped.schedule(step, are_behind=False)

    def _release_behind_window(self) -> None:
        for group in self.running:
            for sequence in group.live:
                self.blocks.release_behind_window(sequence)

    # ---- calls that change the scheduler

    def add_request(self, group: SequenceGroup) -> None:
        """Queue a request. Raises ValueError if a request with this id waits or is on any worker that shares the
        queue."""
        self.waiting.append(group)

    def update_from_output(
        self, output: SchedulerOutput, answer: ModelOutput, now: float = 0.0
    ) -> list[SequenceOutput]:
        """Count a step's computed tokens as stored and append the sampled tokens.

        Returns the results of sequences in the order of the step. A sequence that ended in this step has its final
        status. A sequence that was finished, or preempted by recompute, after the step was sent has no result. Answers
        must come in the order of steps. Raises ValueError if `answer` does not answer the step `output`.
        """
        drafted = output.num_draft_tokens
        if 0 in answer.num_tokens or any(one.num_computed_tokens + 1 >= one.max_num_tokens for one in drafted):
            # A sequence that gained no token, or has almost its maximum length, may have left the steady plan although
            # it still has tokens to compute.
            self._steady.forget()
        seconds = self._in_flight.answer(output, answer, now)
        self.balancer.stepped(self.member, output.num_tokens + sum(answer.num_draft_tokens), seconds)
        if self._groups.accused:
            self._evidence.answered(output, seconds)
        return self._answers.take_in(output, answer)

    def finish_sequence(self, sequence: Sequence, status: SequenceStatus) -> None:
        """End one sequence and free its blocks. Does nothing if the sequence has ended already."""
        self._groups.finish_sequence(sequence, status)

    def finish_requests(self, request_ids: Iterable[str], status: SequenceStatus) -> list[SequenceGroup]:
        """End requests that are on this worker or wait. Unknown ids are skipped. Returns the groups that were found.
        Raises TypeError for a single string, because its letters would be read as ids."""
        if isinstance(request_ids, str | bytes):
            raise TypeError(f"request_ids is {request_ids!r}; it must be a list of ids, of one if there is only one")
        ended: list[SequenceGroup] = []
        for request_id in request_ids:
            group = self._groups.find(request_id)
            if group is not None:
                self._groups.finish(group, status)
                ended.append(group)
        return ended

    def set_admission(self, admits: bool) -> None:
        """Admit waiting groups from now on, or admit none while the worker is drained. Groups that run or are swapped
        out on the worker are not affected."""
        self._admission.set_admission(admits)

    def begin_fetch(self, wanted: Iterable[str], preloads: Iterable[str] = ()) -> AdapterFetch | None:
        """Choose the adapter to fetch next for the worker; None if no adapter can be fetched now. `wanted` contains
        adapter ids, for example the `lacking_adapters` of a step. The first adapter of `wanted` that the worker does
        not hold is fetched. If the worker holds all of `wanted`, the first missing adapter of `preloads` is fetched. No
        held adapter is dropped to make room for a preload."""
        return self.adapters.begin_fetch(wanted, preloads)

    def end_fetch(self, seconds: float | None) -> None:
        """End the fetch that `begin_fetch` began. `seconds` is the duration of the fetch; None if the fetch failed."""
        self.adapters.end_fetch(is_held=seconds is not None)
        if seconds is not None:
            self.member.brought_adapter(seconds)

    def hold_adapter(self, adapter_id: str) -> None:
        """Note that the worker already holds an adapter."""
        self.adapters.hold(adapter_id)

    def drop_adapter(self, adapter_id: str) -> bool:
        """Stop counting an adapter as held by the worker. Returns whether the worker held the adapter. The worker
        forgets the adapter after all steps in flight are answered. Raises ValueError if a group on this worker needs
        the adapter."""
        return self.adapters.drop(adapter_id)

    def reset_prefix_cache(self) -> int:
        """Remove all computed blocks from the prefix cache. Requests in flight keep their blocks. Returns the number of
        the worker's blocks that could be found before the reset."""
        return self.blocks.cache.reset()

    def release_all(self, now: float = 0.0, *, blames: bool = True) -> list[SequenceGroup]:
        """Return all groups to the head of the queue, because the worker is gone. After this call no further steps may
        be planned.

        If `blames` is true and steps were in flight, the loss counts against all requests in these steps. Requests of
        the second step in flight are included, because the answer to the first step may have been lost with the worker.
        `blames` is false if the session ended for a reason that no request can cause. Returns a list with the group
        that was ended as the cause of the loss, or an empty list.
        """
        ended = self._evidence.lost(now, blames=blames)
        groups = self._groups.give_all_back()
        self.num_preemptions[PreemptionMode.RECOMPUTE] += len(groups)
        for group in groups:
            group.history.num_recomputes += 1
        assert self.blocks.device.num_free == self.blocks.device.num_blocks
        self.blocks.device.withdraw_all()
        self.adapters.withdraw_all()
        self.balancer.leave(self.member)
        return ended

    # ---- queries

    @property
    def has_work(self) -> bool:
        """Whether `schedule` can return a step that is not empty."""
        return bool(self._groups.has_work or (self._admission.admits and self.waiting))

    def get_request_counts(self) -> tuple[int, int, int]:
        """The numbers of requests that run on this worker, that wait, and that are swapped out on this worker. A
        request with several sequences counts once.

        In vLLM, `get_request_counts` returns two numbers for a single engine: requests that run, and requests that
        wait. In this scheduler all workers share one queue, so the number of waiting requests must not be added up over
        workers. After recompute, a preempted request counts as waiting, as in vLLM. After a swap, a preempted request
        counts as swapped out, which is a state that vLLM does not have. A request that has ended is not counted, even
        before the worker is told.
        """
        return len(self.running), len(self.waiting), len(self.swapped)

    @property
    def admits(self) -> bool:
        """Whether waiting groups may be given to this worker."""
        return self._admission.admits

    @property
    def num_running_seqs(self) -> int:
        """Number of sequences of all running groups, counted as in a step's budget."""
        return self._groups.num_running_seqs

    @property
    def running_adapters(self) -> Mapping[str, int]:
        """The number of running groups that need each adapter."""
        return self.adapters.running

    @property
    def steps_in_flight(self) -> SequenceOf[SchedulerOutput]:
        """The steps that the worker has not answered, the oldest first."""
        return self._in_flight.outputs

    @property
    def answered_at(self) -> float:
        """The time of the worker's last answer to a step."""
        return self._in_flight.answered_at

    def room_for(self, group: SequenceGroup) -> int | None:
        """Number of a waiting group's tokens that this worker has cached or is computing; None if the next step has no
        room for the group."""
        return self._admission.room_for(group)

    def has_adapter_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the worker holds the group's adapter, and can run it together with the adapters of the running
        groups. Groups in `without` do not count as running."""
        return self.adapters.has_slot(group, without=without)

    def seconds_to_copy(self, group: SequenceGroup) -> float:
        """Seconds that a step needs to copy the group's adapter to the device; 0 if the adapter is on the device
        already."""
        return 0.0 if self.adapters.is_on_device(group.adapter_id) else self.config.lora_copy_seconds


def _blocks(config: SchedulerConfig, member: Member, waiting: WaitingQueue) -> BlockManager:
    return BlockManager(
        config.block_size,
        config.num_device_blocks,
        config.num_host_blocks,
        config.watermark,
        prefix_caching=config.caches_prefixes,
        num_lookahead_slots=config.num_lookahead_slots,
        sliding_window=config.sliding_window,
        max_blocks_per_sequence=config.max_blocks_per_sequence,
        max_sequence_tokens=config.max_sequence_tokens,
        directory=waiting.balancer.directory,
        bit=member.bit,
    )
