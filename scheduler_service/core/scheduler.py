"""Plans the steps of one worker.

There is no prefill phase and no decode phase. In each step, a sequence computes as many of its uncomputed tokens as the
step's budget allows. The order is: sequences that need a single token, prompts under way, swapped groups, waiting
groups. A waiting group goes before a swapped group only if the waiting group outranks it.

A long prompt first computes at most `max_prefill_chunk` tokens, so that later requests join the step. Long prompts
share the rest of the budget in the order of scheduling.

If blocks run out, the queue's policy chooses the group to preempt. All swaps to the host are planned before any swap
back, and the worker copies in this order.

Steps can be planned before earlier steps are answered, because planning requires only the number of tokens. The worker
does steps in order, so freed blocks can be reused at once. If a sequence turns out to have stopped, only its slots in
the steps in flight are wasted. Plans assume that all drafts in flight are accepted.
"""

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import PhaseRule, SchedulerConfig
from scheduler_service.core.groups.prompt_item import WorkerItems
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ModelOutput, SchedulerOutput, SequenceOutput
from scheduler_service.core.placement.worker import Member
from scheduler_service.core.planning.adapters import AdapterFetch, Adapters
from scheduler_service.core.planning.answers import Answers
from scheduler_service.core.planning.encoder_cache import EncoderCache
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.planning.running import ChunkSizes, DraftRoom, RunningPlanner, SteadyPlan
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.step import Step
from scheduler_service.core.planning.step_writer import StepWriter
from scheduler_service.core.planning.swapped import SwappedPlanner
from scheduler_service.core.planning.waiting import WaitingPlanner
from scheduler_service.core.planning.worker_groups import Session, StepsInFlight, WorkerGroups
from scheduler_service.core.queues.waiting_queue import QueueView, WaitingQueue
from scheduler_service.core.suspects.evidence import Evidence
from scheduler_service.core.suspects.turns import SuspectTurns


class Scheduler:
    """Plans the steps of one worker's session.

    The caller passes answers to `update_from_output` in the order of the steps. An empty step has no answer. `worker`
    is the worker's name, the same in every session. `now` is the time when the session begins.
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
        self.encoder_cache = EncoderCache(config)
        shared = self.blocks, self._in_flight, self.adapters, WorkerItems(), self.encoder_cache
        self._groups = WorkerGroups(config, waiting, *shared)
        session = Session(config, worker, waiting, balancer, self.member, *shared, self._groups)
        chunk_sizes = ChunkSizes(session)
        prefixes = SharedPrefixes(session)
        self._preemption = Preemption(session, prefixes)
        self._running = RunningPlanner(session, chunk_sizes, self._preemption, prefixes)
        self._admission = WaitingPlanner(session, chunk_sizes, self._preemption, prefixes)
        self._swapped = SwappedPlanner(session, self._running, self._admission)
        self._steady = SteadyPlan(session)
        self._draft_room = DraftRoom(session)
        self._suspects = SuspectTurns(session, self._running, self._admission)
        self._writer = StepWriter(session)
        self._evidence = Evidence(session)
        self._answers = Answers(session)
        self._has_windows = any(group.window for group in config.groups)
        self.running = self._groups.running  # in the order of admission
        self.swapped = self._groups.swapped  # the first resumes first
        self.num_preemptions = self._preemption.counts
        self._evidence.join(now)

    # ---- planning

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step. `now` is the time in seconds of any monotonic clock. An empty step has no step id and
        need not be sent."""
        if not self.has_work:
            return self._writer.write_nothing()
        step = Step(self.config, QueueView(self.waiting, self.worker), now)
        self.encoder_cache.settle()
        may_suspect = self._groups.accused or (self.waiting and self.waiting.head.is_suspect)
        suspect = self._suspects.next(step) if may_suspect else None
        if suspect is not None and self._in_flight.outputs:
            return self._writer.write_nothing(step)
        self.encoder_cache.waits = suspect is not None
        if self._has_windows:
            self._release_behind_window()
        if suspect is not None or not self._repeat(step):
            step.budget.take(num_seqs=self._groups.num_running_seqs)
            if suspect is None or not self._suspects.schedule(suspect, step):
                self._schedule_all(step)
        self._running.hand_out_rest(step)
        if self._admission.schedule_sharing(step):
            self._running.hand_out_rest(step)
        if self.config.num_lookahead_slots:
            self._draft_room.hand_out(step)
        if self.blocks.states:
            self._keep_states(step)
        output = self._writer.write(step)
        self.blocks.states.planned()
        self._steady.look_ahead(step)
        self._admission.report(step)
        if self.config.max_held_loras:
            self.adapters.planned()
        return output

    def _repeat(self, step: Step) -> bool:
        """Repeat the steady plan if there is one, and admit waiting groups to the rest of the step."""
        if not self._steady.is_known or self._admission.breaks_plan(step.now) or not self._steady.repeat(step):
            return False
        if self.waiting and self.config.phase_rule is PhaseRule.CHUNKED:
            self._admission.schedule(step)
        return True

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
        """Plan prompts under way, then swapped and waiting groups, each in its phase. If the step has no prompt, plan
        decodes."""
        ready, behind = self._running.split(step)
        self._running.schedule(behind, step)
        if self.swapped:
            if self._admission.is_time(step.now):
                self._admission.schedule(step)
            self._swapped.schedule(step, are_behind=True)
        if self._admission.is_time(step.now):
            self._admission.schedule(step)
        if step.num_tokens:
            step.prompts_began = step.now
            return
        self._running.schedule(ready, step)
        self._swapped.schedule(step, are_behind=False)

    def _release_behind_window(self) -> None:
        for group in self.running:
            for sequence in group.sequences:
                # Another sequence may have the id that an ended one had on a lost worker.
                if sequence.num_computed_tokens >= sequence.releases_at and not sequence.status.is_finished:
                    self.blocks.release_behind_window(sequence)

    def _keep_states(self, step: Step) -> None:
        """Keep states of the step's sequences for the prefix cache, with the blocks that are left."""
        self.blocks.states.settle()
        for sequence in step.needy:
            step.state_copies += self.blocks.states.keep(sequence)
        for chunk in itertools.chain.from_iterable(step.chunks.values()):
            if chunk.num_tokens and not any(
                target in self.blocks.states.blocks_of(chunk.sequence) for _, target in chunk.copies
            ):
                step.state_copies += self.blocks.states.keep(chunk.sequence)

    # ---- calls that change the scheduler

    def add_request(self, group: SequenceGroup) -> None:
        """Queue a request. Raises ValueError if a request with this id waits or is on any worker."""
        self.waiting.append(group)

    def update_from_output(
        self, output: SchedulerOutput, answer: ModelOutput, now: float = 0.0
    ) -> list[SequenceOutput]:
        """Count a step's computed tokens as stored and append the sampled tokens.

        Returns results in the order of the step. Sequences that were finished or recomputed after the step was sent
        have no result. Answers must come in the order of steps. Raises ValueError if `answer` does not answer the step
        `output`.
        """
        drafted = output.num_draft_tokens
        if 0 in answer.num_tokens or any(one.num_computed_tokens + 1 >= one.max_num_tokens for one in drafted):
            # Such a sequence may have left the steady plan although it has tokens to compute.
            self._steady.forget()
        seconds = self._in_flight.answer(output, answer, now)
        if not output.times_images:
            self.balancer.stepped(self.member, output.num_tokens + sum(answer.num_draft_tokens), seconds)
        if self._groups.accused:
            self._evidence.answered(output, seconds)
        if self.config.prepares_images:
            self.encoder_cache.prepared(answer.prepared_items)
        return self._answers.take_in(output, answer)

    def finish_sequence(self, sequence: Sequence, status: SequenceStatus) -> None:
        """End one sequence, if it has not ended, and free its blocks."""
        self._groups.finish_sequence(sequence, status)

    def finish_requests(self, request_ids: Iterable[str], status: SequenceStatus) -> list[SequenceGroup]:
        """End requests that are on this worker or wait. Returns the groups that were found. Raises TypeError for a
        single string, because its letters would be read as ids."""
        if isinstance(request_ids, str | bytes):
            raise TypeError(f"request_ids is {request_ids!r}; it must be a list of ids")
        ended: list[SequenceGroup] = []
        for request_id in request_ids:
            group = self._groups.find(request_id)
            if group is not None:
                self._groups.finish(group, status)
                ended.append(group)
        return ended

    def set_admission(self, admits: bool) -> None:
        """Admit waiting groups from now on, or none while the worker is drained."""
        self._admission.set_admission(admits)

    def begin_fetch(self, wanted: Iterable[str], preloads: Iterable[str] = ()) -> AdapterFetch | None:
        """See `Adapters.begin_fetch`. `wanted` contains adapter ids, such as a step's `lacking_adapters`."""
        return self.adapters.begin_fetch(wanted, preloads)

    def end_fetch(self, seconds: float | None) -> None:
        """End the fetch that `begin_fetch` began. `seconds` is its duration; None if it failed."""
        self.adapters.end_fetch(is_held=seconds is not None)
        if seconds is not None:
            self.member.brought_adapter(seconds)

    def hold_adapter(self, adapter_id: str) -> None:
        self.adapters.hold(adapter_id)

    def drop_adapter(self, adapter_id: str) -> bool:
        """Stop counting an adapter as held. Returns whether the worker held it. The worker forgets the adapter after
        all steps in flight are answered. Raises ValueError if a group on this worker needs the adapter."""
        return self.adapters.drop(adapter_id)

    def reset_prefix_cache(self) -> int:
        """Remove all computed blocks from the prefix cache. Returns the number of device blocks that could be found."""
        return self.blocks.reset_prefix_cache()

    def release_all(self, now: float = 0.0, *, blames: bool = True) -> list[SequenceGroup]:
        """Return all groups to the head of the queue, because the worker is gone. No further steps may be planned.

        If `blames` is true, the loss counts against all requests in flight. The second step in flight is included,
        because the answer to the first may have been lost with the worker. Returns the groups that were ended as the
        cause of the loss.
        """
        ended = self._evidence.lost(now, blames=blames)
        groups = self._groups.give_all_back()
        for group in groups:
            group.history.num_recomputes += 1
            group.history.num_losses += 1
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
        """The numbers of requests that run, that wait, and that are swapped out (vLLM returns the first two). All
        workers share one queue, so the number of waiting requests must not be added up over workers."""
        return len(self.running), len(self.waiting), len(self.swapped)

    @property
    def admits(self) -> bool:
        return self._admission.admits

    @property
    def num_running_seqs(self) -> int:
        return self._groups.num_running_seqs

    @property
    def running_adapters(self) -> Mapping[str, int]:
        return self.adapters.running

    @property
    def steps_in_flight(self) -> SequenceOf[SchedulerOutput]:
        """The steps that the worker has not answered, the oldest first."""
        return self._in_flight.outputs

    @property
    def in_flight(self) -> StepsInFlight:
        return self._in_flight

    @property
    def answered_at(self) -> float:
        return self._in_flight.answered_at

    def room_for(self, group: SequenceGroup) -> int | None:
        return self._admission.room_for(group)

    def has_adapter_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        return self.adapters.has_slot(group, without=without)

    def seconds_to_copy(self, group: SequenceGroup) -> float:
        return 0.0 if self.adapters.is_on_device(group.adapter_id) else self.config.lora_copy_seconds


def _blocks(config: SchedulerConfig, member: Member, waiting: WaitingQueue) -> BlockManager:
    return BlockManager(
        config.block_size,
        config.num_device_blocks,
        config.num_host_blocks,
        config.watermark,
        prefix_caching=config.caches_prefixes,
        num_lookahead_slots=config.num_lookahead_slots,
        layer_groups=config.groups,
        max_chunk=config.largest_chunk,
        max_sequence_tokens=config.max_sequence_tokens,
        directory=waiting.balancer.directory,
        bit=member.bit,
    )
