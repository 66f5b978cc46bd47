"""Plans one worker's steps.

There is no prefill phase and no decode phase: a sequence is scheduled for the tokens that are not computed yet, as many
as the step's budget leaves. Sequences that need a single token go first, so that a long prompt never holds up the
others; then prompts under way; then groups that were swapped out; then, when all of those that have a slot for their
adapter are back, the head of the waiting queue, which goes before one of them only if it outranks it. Of a long prompt
no more than `max_prefill_chunk` tokens are taken at first, so that those behind it get into the step as well. What is
left of the budget after that goes to the long ones in the same order, so that a lone prompt is computed as fast as it
can be. When blocks run out, the policy's victim is preempted: the group admitted last, or last in rank. Within a step
all swapping out is planned before any swapping in, which is the order in which the worker does it.

Steps may be planned ahead of the answers to earlier ones; the worker works in step order and feeds the tokens that it
sampled, so a plan needs to know only how many there will be. Blocks that are let go of while steps are in flight may
be given away at once, because the sequence that gets them writes in a later step. A sequence that turns out to have
stopped has wasted its slot in the steps ahead, and only that.

Where the worker drafts how a sequence goes on, a step has room for some drafts behind its token, as far as all else
leaves any. The worker makes and verifies them, and how many were right, and so where the sequence stands, is known with
the answer. Until then plans count with the most that it may be.

Where to read on: what a step is and how its bytes are counted in planning/step.py; steps like the one before in
planning/steady_plan.py; requests that wait for a prefix which others compute in planning/shared_prefixes.py; room for
drafts in planning/running.py; steps of its own for a request that workers may be lost to in suspects/turns.py.
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

    Every step that `schedule` returns and that is not empty is answered by `update_from_output`, in order; how many
    steps are planned ahead of the answers is the caller's choice. Between them `finish_requests` and `finish_sequence`
    may be called at any time; they free blocks at once, and the worker, which works in step order, never notices.

    `worker` is the worker's name, the same one in every session; `now` is the time at which the session begins.
    """

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, worker: str = "", now: float = 0.0) -> None:
        self.config = config
        self.worker = worker
        self.waiting = waiting
        self.balancer = balancer = waiting.balancer
        self.member = balancer.join(self)
        try:
            self.blocks = _blocks(config, self.member, waiting)
        except BaseException:  # as MemoryError
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
        self.running = self._groups.running  # in the order of admission
        self.swapped = self._groups.swapped  # first to resume first
        self.num_preemptions = self._preemption.counts
        self._evidence.join(now)

    # ---- planning

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step; `now` is in seconds of any steady clock: it matters with a delay factor or other workers.

        An empty step takes no step id and need not be sent: there is nothing to do, or nothing before an answer, or
        what there is to do is left to other workers. When there is no work at all the call changes nothing.
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
        """Prompts first, those under way before those that were swapped out, and those before new ones; else decodes.

        A swapped group comes back in a step of what it computes next.
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

    # ---- what the caller tells

    def add_request(self, group: SequenceGroup) -> None:
        """Queue a request; raises ValueError while one of its id waits, or is with any worker that shares the queue."""
        self.waiting.append(group)

    def update_from_output(
        self, output: SchedulerOutput, answer: ModelOutput, now: float = 0.0
    ) -> list[SequenceOutput]:
        """Account for a step's computed tokens and append the sampled ones.

        Returns what each sequence gained, in the order of the step; a sequence that thereby ended has its final
        status. Sequences that were finished or preempted by recompute after the step was sent gain nothing. Answers
        come in the order of steps. Raises ValueError when the answer is not to this step.
        """
        drafted = output.num_draft_tokens
        if 0 in answer.num_tokens or any(one.num_computed_tokens + 1 >= one.max_num_tokens for one in drafted):
            self._steady.forget()  # such a one left the plan, and may have more to compute after all
        seconds = self._in_flight.answer(output, answer, now)
        self.balancer.stepped(self.member, output.num_tokens + sum(answer.num_draft_tokens), seconds)
        if self._groups.accused:
            self._evidence.answered(output, seconds)
        return self._answers.take_in(output, answer)

    def finish_sequence(self, sequence: Sequence, status: SequenceStatus) -> None:
        """End one sequence and free its blocks; nothing happens when it has ended already."""
        self._groups.finish_sequence(sequence, status)

    def finish_requests(self, request_ids: Iterable[str], status: SequenceStatus) -> list[SequenceGroup]:
        """End requests that are here or wait; returns those that there were. Unknown ids are passed over.

        Raises TypeError for a single string, whose letters would be taken for ids.
        """
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
        """Admit waiting groups from now on, or none while the worker is drained; those that it has go on either way."""
        self._admission.set_admission(admits)

    def begin_fetch(self, wanted: Iterable[str], preloads: Iterable[str] = ()) -> AdapterFetch | None:
        """Choose an adapter to bring to the worker: of `wanted`, as of a step's `lacking_adapters`, the first that it
        does not hold, or else of `preloads`, for which none gives way.

        None where there is no place or nothing to bring, and while one is being brought.
        """
        return self.adapters.begin_fetch(wanted, preloads)

    def end_fetch(self, seconds: float | None) -> None:
        """The worker has, after so many seconds, what `begin_fetch` chose last; None if it could not be brought."""
        self.adapters.end_fetch(is_held=seconds is not None)
        if seconds is not None:
            self.member.brought_adapter(seconds)

    def hold_adapter(self, adapter_id: str) -> None:
        """The worker has an adapter already."""
        self.adapters.hold(adapter_id)

    def drop_adapter(self, adapter_id: str) -> bool:
        """The worker is to forget an adapter, once all steps in flight are answered; returns whether it has it.

        Raises ValueError while a group here needs it.
        """
        return self.adapters.drop(adapter_id)

    def reset_prefix_cache(self) -> int:
        """Have no request find the blocks computed so far; requests in flight keep theirs.

        Returns the number of the worker's blocks that could be found.
        """
        return self.blocks.cache.reset()

    def release_all(self, now: float = 0.0, *, blames: bool = True) -> list[SequenceGroup]:
        """The worker is gone: give all its groups back to the head of the queue. Plan no further steps.

        If steps were in flight, it `blames` the requests in them: any may be what the worker was lost to, also one of
        the second step where the answer to the first was lost with it. Nothing is blamed when the session ended for
        reasons of its own. Returns the group that was ended for the loss, in a list, or none.
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

    # ---- what the caller asks

    @property
    def has_work(self) -> bool:
        """Whether `schedule` might return something other than an empty step."""
        return bool(self._groups.has_work or (self._admission.admits and self.waiting))

    def get_request_counts(self) -> tuple[int, int, int]:
        """How many requests run here, how many wait, and how many are swapped out here: a group counts once.

        vLLM's `get_request_counts` returns two numbers, of requests that run and that wait for its one engine. Here the
        second is of the queue that all workers share, so it must not be added up over workers. A preempted request
        counts as waiting after recompute, as there, and as swapped out after a swap, which vLLM does not know. A
        request that has ended counts nowhere, even if the worker has yet to be told.
        """
        return len(self.running), len(self.waiting), len(self.swapped)

    @property
    def admits(self) -> bool:
        """Whether waiting groups may be given to the worker."""
        return self._admission.admits

    @property
    def num_running_seqs(self) -> int:
        """Sequences of the running groups together, counted as budgets count them."""
        return self._groups.num_running_seqs

    @property
    def running_adapters(self) -> Mapping[str, int]:
        """Adapters, and how many running groups need each."""
        return self.adapters.running

    @property
    def steps_in_flight(self) -> SequenceOf[SchedulerOutput]:
        """The steps without an answer, the oldest first."""
        return self._in_flight.outputs

    @property
    def answered_at(self) -> float:
        """When the last answer came."""
        return self._in_flight.answered_at

    def room_for(self, group: SequenceGroup) -> int | None:
        """Cached tokens that a waiting group would find here, if the next step could take it; else None."""
        return self._admission.room_for(group)

    def has_adapter_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the group's adapter can join those of the running groups, `without` those that would make room."""
        return self.adapters.has_slot(group, without=without)

    def seconds_to_copy(self, group: SequenceGroup) -> float:
        """Seconds that the first step with the group's adapter takes longer, if the adapter is not on the device."""
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
