"""Plans one worker's steps.

There is no prefill phase and no decode phase: a sequence is scheduled for the tokens that are not computed yet, as many
as the step's budget leaves. Sequences that need a single token go first, so that a long prompt never holds up the
others; then prompts under way; then groups that were swapped out; then, when all of those that have a slot for their
adapter are back, the head of the waiting queue, which goes before one of them only if it outranks it. Of a long prompt
no more than `max_prefill_chunk` tokens are taken at first, so that those behind it get into the step as well. What is
left of the budget when all had their turn goes to the long ones in the same order, so that a lone prompt is computed as
fast as it can be. What the worker has to be told of them is counted as their tokens are: see step_bytes.py. When blocks
run out, the group that was admitted last is preempted: its blocks are freed and it computes its tokens anew later
(recompute), or they are copied to host memory and back (swap). Within a step all swapping out is planned before any
swapping in, which is the order in which the worker does it.

Steps may be planned ahead of the answers to earlier ones; the worker works in step order and feeds the tokens that it
sampled, so a plan needs to know only how many there will be. Blocks that are let go of while steps are in flight may
be given away at once, because the sequence that gets them writes in a later step. A sequence that turns out to have
stopped has wasted its slot in the steps ahead, nothing else.

Most steps are like the one before: every running sequence computes one token. Such a step reuses the plan of the one
before and looks only at who needs a block. Who has ended is taken out of that plan and who is ready to decode joins it;
whoever has to be computed otherwise, is preempted or is suspected puts an end to it.

A request that brings workers down must not take all other streams with it. A request that was in flight twice in a
row when a worker was lost is a suspect and is scheduled alone, with nothing else in flight, until it has gained a
token, or more of them the more workers were lost; when these losses cannot be coincidence it is ended: suspicion.py has
the rule. But it may be the worker that is to blame: a suspect goes to another one than it was lost on, if there is any,
and is not ended before that.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.manager import AllocStatus
from scheduler_service.core.config import PhaseRule, PreemptionMode
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.outputs import ScheduledSequence, SchedulerOutput
from scheduler_service.core.placement.balancer import (
    MAX_OVERTAKES,
    MOST_LEFT,
    MOST_SLOTLESS,
)
from scheduler_service.core.placement.choice import Placement, PlacementReason
from scheduler_service.core.planning.budget import SchedulingBudget
from scheduler_service.core.planning.step_bytes import bytes_to_tell, swap_bytes
from scheduler_service.core.planning.step_writer import Chunk, Step, StepWriter


class Scheduler(StepWriter):
    """Plans the steps of one worker's session.

    Every step that `schedule` returns and that is not empty is answered by `update_from_output`, in order; how many
    steps are planned ahead of the answers is the caller's choice. Between them `finish_requests` and `finish_sequence`
    may be called at any time; they free blocks at once, and the worker, which works in step order, never notices.
    """

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step; `now` is in seconds of any steady clock: it matters with a delay factor or other workers.

        An empty step takes no step id and need not be sent: there is nothing to do, or nothing before an answer, or
        what there is to do is left to other workers. When there is no work at all the call changes nothing.
        """
        if not self.has_work:
            return SchedulerOutput(self._step_id + 1)
        config = self.config
        budget = SchedulingBudget(config.max_num_batched_tokens, config.max_num_seqs, config.max_step_bytes)
        step = Step(budget, now)
        suspect = self._find_suspect(step)
        if suspect is not None and self._in_flight:
            output = SchedulerOutput(self._step_id + 1)
            self._write_placements(step, output)
            return output
        if config.sliding_window:
            for group in self.running:
                for sequence in group.live:
                    self.blocks.release_behind_window(sequence)
        if suspect is None and self._steady is not None and self._schedule_steady(self._steady, step):
            self._hand_out_rest(step)
            return self.write(step)
        step.budget.take(num_seqs=self.num_running_seqs)
        if suspect is None or not self._schedule_suspect(suspect, step):
            if config.phase_rule is PhaseRule.CHUNKED:
                self._schedule_together(step)
            else:
                self._schedule_separately(step)
        self._hand_out_rest(step)
        return self.write(step)

    def update_draft_token_ids(self, drafts: Mapping[int, SequenceOf[int]]) -> None:
        """Guess how running sequences go on, by sequence id; the next step of each verifies what it has room for.

        At most `num_lookahead_slots` guesses of a sequence count, and none that would go past its longest output.
        Sequences that are gone, or that have a step in flight, are passed over.
        """
        for group in self.running:
            for sequence in group.live:
                if sequence.id in drafts and sequence.num_stored_tokens == sequence.num_computed_tokens:
                    if sequence.sampling.num_logprobs is not None:
                        continue  # they are reported for sampled tokens only
                    room = sequence.max_num_tokens - sequence.num_tokens - 1
                    most = max(0, min(self.config.num_lookahead_slots, room))
                    sequence.draft_token_ids = list(drafts[sequence.id][:most])
                    self._steady = None

    def _schedule_together(self, step: Step) -> None:
        ready, behind = self._split(step)
        for group in ready + behind:
            if group in self.running:  # it may have been preempted for an earlier one
                self._schedule_running(group, step)
        if self.swapped:
            self._schedule_waiting(step)
            self._schedule_swapped(step)
        self._schedule_waiting(step)

    def _schedule_separately(self, step: Step) -> None:
        """Prompts first, those under way before those that were swapped out, and those before new ones; else decodes.

        A swapped group comes back in a step of what it computes next.
        """
        ready, behind = self._split(step)
        for group in behind:
            if group in self.running:
                self._schedule_running(group, step)
        if self.swapped:
            if self._may_admit(step.now):
                self._schedule_waiting(step)
            self._schedule_swapped(step, are_behind=True)
        if self._may_admit(step.now):
            self._schedule_waiting(step)
        if step.chunks:
            step.prompts_began = step.now
            return
        for group in ready:
            if group in self.running:
                self._schedule_running(group, step)
        self._schedule_swapped(step, are_behind=False)

    def _may_admit(self, now: float) -> bool:
        """Whether the earliest arrival has waited for long enough that prompts could batch up."""
        if not self.waiting or not self.running:
            return True
        return now - self.waiting.earliest_arrival >= self.config.delay_factor * self._prompt_seconds

    def _schedule_steady(self, plan: list[ScheduledSequence], step: Step) -> bool:
        """Repeat the last plan and fill the rest of the step from the queue; returns whether that was possible."""
        running = SequenceStatus.RUNNING
        plan = [scheduled for scheduled in plan if scheduled.sequence.status is running]
        if self.swapped or not 0 < len(plan) <= step.budget.num_tokens:
            return False
        if self.waiting and self.admits:
            head = self.waiting.head
            if self.config.phase_rule is PhaseRule.SEPARATE and self._may_admit(step.now):
                return False
            if self.waiting.outranks(head, self.waiting.victim(self.running)):
                return False
        needy = [s for s, _, _ in plan if s.num_computed_tokens >= s.num_slots]
        if len(needy) > self.blocks.device.num_free:
            return False
        for sequence in needy:
            self.blocks.append_slots(sequence, 1)
        step.budget.take(num_tokens=len(plan), num_seqs=self.num_running_seqs)
        step.steady, step.needy = plan, needy
        if self.waiting and self.config.phase_rule is PhaseRule.CHUNKED:
            self._schedule_waiting(step)
        return True

    def _find_suspect(self, step: Step) -> SequenceGroup | None:
        """The suspect that runs here, or else the first of those next in the queue that is not for another worker."""
        if self._runs_suspect:
            return self._suspect
        if not (self.admits and self.waiting and self.waiting.head.is_suspect):
            return None
        for group in self.waiting.upcoming(MOST_LEFT, equals=False):
            if not group.is_suspect:
                break
            if not self._hold_suspect(group, step) and not self._leave_suspect(group, step):
                return group if self._next_waiting(step) is group and self._can_start(group, step) else None
        return None

    def _hold_suspect(self, suspect: SequenceGroup, step: Step) -> bool:
        """Let a suspect wait, while what may come of it would prove nothing."""
        background = self.balancer.background
        missing = suspect.suspicion.missing_control(background, step.now) if suspect.suspicion is not None else 0.0
        if missing:
            step.held[suspect] = background.ahead(step.now, missing)
        return missing > 0.0

    def _can_start(self, suspect: SequenceGroup, step: Step) -> bool:
        """Whether a step of its own would do a waiting suspect any good; else nobody need be held up for it."""
        budget = SchedulingBudget(step.budget.num_tokens, step.budget.num_seqs, step.budget.num_bytes)
        budget.take(num_seqs=self.num_running_seqs)
        if self._status(suspect, budget) is not AllocStatus.LATER:
            return True
        return bool(self.running) and self.waiting.outranks(suspect, self.waiting.victim(self.running))

    def _leave_suspect(self, suspect: SequenceGroup, step: Step) -> bool:
        if (placement := self.balancer.place_untried(self.member, suspect)) is not None:
            step.left[suspect] = placement  # for however long: nobody can tell whose doing it is who was lost here only
            return True
        if not self.balancer.has_others(self.member):
            return False
        if self.room_for(suspect) is None:
            placement = self.balancer.place_elsewhere(self.member, suspect, step.now)
        else:
            placement = self.balancer.place(self.member, suspect, len(self.waiting), step.now)
        return placement is not None and self._leave(placement, step)

    def _schedule_suspect(self, suspect: SequenceGroup, step: Step) -> bool:
        """Give the step to a suspect alone, if it has room; returns whether that was done."""
        self._suspect = suspect
        if suspect in self.running:
            step.prompts.append(suspect)
            self._schedule_running(suspect, step)
        else:
            self._schedule_waiting(step, suspect)
        return bool(step.chunks)

    def _split(self, step: Step) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """Running groups that are ready to decode, and those that are behind."""
        ready: list[SequenceGroup] = []
        behind: list[SequenceGroup] = []
        for group in self.running:
            (behind if group.is_behind else ready).append(group)
        step.prompts += behind
        return ready, behind

    def _schedule_running(self, group: SequenceGroup, step: Step) -> None:
        if group.live[0].id not in self.blocks.tables:  # its leader ended before the others could fork
            step.budget.give_back(num_seqs=group.num_seqs)
            self._release(group)
            self.waiting.put_back([group])
            return
        chunks, num_long = self._chunks(group, step)
        while not self.blocks.can_append_slots(chunks):
            if len(self.running) == 1:
                step.budget.give_back(num_seqs=group.num_seqs)
                self._ignore(group, step)
                return
            victim = self.waiting.victim(self.running)
            self._preempt(victim, step)
            if victim is group:
                return
            chunks, num_long = self._chunks(group, step)
        if chunks:
            step.num_long += num_long
            step.chunks[group] = [
                Chunk(
                    sequence,
                    num_tokens,
                    self._bytes_to_tell(sequence, num_tokens),
                    self.blocks.append_slots(sequence, num_tokens),
                )
                for sequence, num_tokens in chunks
            ]
            step.budget.take(
                num_tokens=sum(chunk.num_tokens for chunk in step.chunks[group]),
                num_bytes=sum(chunk.num_bytes for chunk in step.chunks[group]),
            )

    def _chunks(self, group: SequenceGroup, step: Step) -> tuple[list[tuple[Sequence, int]], int]:
        """What each sequence computes next, before all others had their turn, and how many of these have more to do.

        Each of those takes half as many tokens as the one before it, the first `max_prefill_chunk` of them. So all of
        them together leave room in the step for what is shorter, however many there are. A follower has no table before
        its leader's prompt is done.
        """
        num_tokens_left, num_bytes_left, num_long = step.budget.num_tokens, step.budget.num_bytes, 0
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._due(group):
            num_tokens = sequence.num_uncomputed_tokens
            is_long = num_tokens > self._max_chunk
            if is_long:
                num_tokens = max(1, self._max_chunk >> (step.num_long + num_long))
            num_tokens = min(num_tokens, num_tokens_left)
            if num_tokens and sequence.id in self.blocks.tables:
                if num_tokens == 1 and sequence.draft_token_ids and not is_long:
                    num_tokens += min(len(sequence.draft_token_ids), num_tokens_left - 1)
                if not sequence.num_known_blocks:
                    if num_bytes_left <= 0:
                        continue
                    num_bytes_left -= self._bytes_to_tell(sequence, num_tokens)
                chunks.append((sequence, num_tokens))
                num_long += is_long
                num_tokens_left -= num_tokens
        return chunks, num_long

    def _hand_out_rest(self, step: Step) -> None:
        """Let prompts compute more than the first chunk that they were given, in order, with what all others left.

        Also where no prompt is too long for the step: a group that was preempted after its turn gives tokens back.
        """
        if not step.budget.num_tokens:
            return
        for group in step.prompts:
            for chunk in step.chunks.get(group, ()):
                sequence = chunk.sequence
                more = min(sequence.num_uncomputed_tokens - chunk.num_tokens, step.budget.num_tokens)
                num_tokens = chunk.num_tokens + more
                if more > 0 and self.blocks.can_append_slots([(sequence, num_tokens)]):
                    step.budget.take(num_tokens=more)
                    chunk.copies += self.blocks.append_slots(sequence, num_tokens)
                    chunk.num_tokens = num_tokens

    def _due(self, group: SequenceGroup) -> list[Sequence]:
        """The live sequences; with separate phases those that are behind first, so that none decodes among them."""
        live = group.live
        if self.config.phase_rule is PhaseRule.CHUNKED or len(live) == 1:
            return live
        return [s for s in live if s.num_uncomputed_tokens > 1 and s.id in self.blocks.tables] or live

    def _bytes_to_tell(self, sequence: Sequence, num_tokens: int) -> int:
        """What a sequence that computes so many tokens takes of the step's bytes: nothing, if its table is known."""
        if sequence.num_known_blocks:
            return 0
        return bytes_to_tell(sequence, self.blocks.num_table_entries(sequence, num_tokens))

    def _schedule_swapped(self, step: Step, *, are_behind: bool | None = None) -> None:
        """Resume groups in turn while there is room, and while they are behind or not, as it is asked for.

        A group that a waiting one outranks comes after that: else it would take the room that the other waits for. One
        whose adapter has no slot is passed over as in the waiting queue.
        """
        for group in list(self.swapped):
            if step.num_preempted or step.budget.is_spent:
                return
            if group in step.slotless:
                continue
            has_lora_slot = self.has_lora_slot(group)
            if has_lora_slot and are_behind is (not group.is_behind):
                return
            status = self.blocks.can_swap_in(
                group, self.config.max_num_batched_tokens, leave_watermark=bool(self.running)
            )
            if status is AllocStatus.NEVER:
                self._ignore(group, step)
                continue
            has_slots = group.num_seqs <= step.budget.num_seqs and has_lora_slot
            if status is AllocStatus.LATER or not has_slots or self._is_outranked(group, step):
                if not (self._move(group, step) or self._pass_over(group, step)):
                    return
                continue
            if any(passed.num_overtaken >= MAX_OVERTAKES for passed in step.slotless):
                return
            self.balancer.overtook(step.slotless)
            step.budget.take(num_seqs=group.num_seqs)
            pairs = self.blocks.swap_in(group)
            step.swap_in += pairs
            del self.swapped[group]
            self._start_running(group)
            for sequence in group.live:
                sequence.status = SequenceStatus.RUNNING
            step.prompts.append(group)
            self._schedule_running(group, step)
            step.budget.take(num_bytes=swap_bytes(len(pairs)))

    def _is_outranked(self, swapped: SequenceGroup, step: Step) -> bool:
        """Whether the next waiting group goes before a swapped one; a suspect goes by rules of its own."""
        group = self._next_waiting(step) if self.admits and self.waiting else None
        return group is not None and not group.is_suspect and self.waiting.outranks(group, swapped)

    def _move(self, group: SequenceGroup, step: Step) -> bool:
        """Give a swapped group back to the queue, if another worker would compute it anew sooner."""
        placement = self.balancer.resume_elsewhere(self.member, group, step.now)
        if placement is None:
            return False
        group.num_moves += 1
        self._preempted.extend(sequence.id for sequence in group.live if sequence.is_known)
        self._release(group)
        self.waiting.put_back([group])
        self.balancer.num_moved += 1
        step.moved.append(placement)
        return True

    def _schedule_waiting(self, step: Step, suspect: SequenceGroup | None = None) -> None:
        """Admit groups in turn, or only the `suspect` that is next; before a swapped one only those that outrank it.

        Age bounds how many outrank it, and with that how often it is overtaken.
        """
        has_choice = suspect is None and self.balancer.has_others(self.member)
        has_reported = False
        most: int | None = None if suspect is None else 1
        if step.num_preempted:
            return
        while self.admits and self.waiting and step.budget.num_bytes > 0 and len(step.chunks) != most:
            group = self._next_waiting(step)
            if group is None or (group.is_suspect and suspect is None):
                return  # the turn of a suspect comes in a step of its own
            swapped = next((swapped for swapped in self.swapped if swapped not in step.slotless), None)
            if swapped is not None and suspect is None and not self.waiting.outranks(group, swapped):
                return
            status = self._status(group, step.budget)
            if status is AllocStatus.NEVER:
                self.waiting.remove(group.request_id)
                self._ignore(group, step)
                step.upcoming = []
                continue
            placement = Placement(group, PlacementReason.ALONE if suspect is None else PlacementReason.SUSPECT)
            if status is AllocStatus.LATER:
                is_head = not step.left and not step.slotless
                if is_head and self._make_room(group, step, has_choice=has_choice):
                    most = len(step.chunks) + 1  # groups that made room for this one do not come back at once
                elif suspect is None and self._pass_over(group, step):
                    continue
                else:
                    return
            elif has_choice:
                if not has_reported:
                    self.report(step)
                    has_reported = True
                placement = self.balancer.place(self.member, group, len(self.waiting), step.now)
                if self._leave(placement, step):
                    if placement.reason is PlacementReason.LOAD:
                        return  # there is too much to do here for those after it as well
                    continue
            self._admit(group, placement, step)

    def _next_waiting(self, step: Step) -> SequenceGroup | None:
        """The first that is neither held, nor left to another worker, nor without a slot for its adapter here.

        None when those that are left or without a slot have been overtaken often enough.
        """
        if not step.left and not step.slotless and not step.held:
            return self.waiting.head
        if not step.upcoming:  # as far as it was asked for; each refill asks for twice as many
            if len(step.left) > MOST_LEFT or any(
                group.num_overtaken >= MAX_OVERTAKES and self.worker not in group.lost_on for group in step.left
            ):
                return None
            if any(group.num_overtaken >= MAX_OVERTAKES for group in step.slotless):
                return None
            most = 2 * (len(step.left) + len(step.slotless) + len(step.held)) + 1
            groups = self.waiting.upcoming(most, equals=bool(step.left))
            passed = step.left.keys() | step.slotless.keys() | step.held.keys()
            step.upcoming = [group for group in reversed(groups) if group not in passed]
        return step.upcoming[-1] if step.upcoming else None

    def _pass_over(self, group: SequenceGroup, step: Step) -> bool:
        """Look past a group whose adapter has no slot here, if others may overtake it; returns whether that was done.

        With no sequence or no token left in the budget there are no others to look for.
        """
        if self.has_lora_slot(group) or group in step.left or not (step.budget.num_seqs and step.budget.num_tokens):
            return False
        if group.num_overtaken >= MAX_OVERTAKES or len(step.slotless) >= MOST_SLOTLESS:
            return False
        step.slotless[group] = None
        if step.upcoming and group not in self.swapped:
            step.upcoming.pop()
        return True

    def _status(self, group: SequenceGroup, budget: SchedulingBudget) -> AllocStatus:
        if group.num_seqs > self.config.max_num_seqs or self.blocks.sizes.never_fits(group):
            return AllocStatus.NEVER  # before anybody is preempted for it
        if not budget.num_tokens or group.num_seqs > budget.num_seqs or not self.has_lora_slot(group):
            return AllocStatus.LATER
        return self.blocks.can_allocate(group, leave_watermark=bool(self.running))

    def _leave(self, placement: Placement, step: Step) -> bool:
        """Leave a group in the queue, if it is for another worker."""
        if placement.to is None:
            return False
        step.left[placement.group] = placement
        step.upcoming = []  # others may go past it than past those without a slot
        self.balancer.left(placement, step.now)
        return True

    def _admit(self, group: SequenceGroup, placement: Placement, step: Step) -> None:
        self.waiting.remove(group.request_id)
        sequences = group.live
        leader = sequences[0]
        for sequence in sequences:
            sequence.id = next(self._sequence_ids)
            sequence.max_num_tokens = group.max_num_tokens(self.blocks.sizes.max_sequence_tokens)
        group.num_worker_changes += group.worker not in (None, self.worker)
        group.worker = self.worker
        self.blocks.allocate(leader)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = leader.num_computed_tokens
            self.waiting.charge(group, leader.num_prompt_tokens, 0)
        for sequence in sequences:
            sequence.status = SequenceStatus.RUNNING
        self._start_running(group)
        self._by_id[group.request_id] = group
        placement = placement._replace(cached_tokens=leader.num_computed_tokens, num_overtaken=group.num_overtaken)
        self.balancer.took(self.member, placement)
        self.balancer.overtook([*step.left, *step.slotless])
        step.upcoming = []
        step.placements.append(placement)
        step.prompts.append(group)
        ((_, num_tokens),), num_long = self._chunks(group, step)
        num_bytes = self._bytes_to_tell(leader, num_tokens)
        step.num_long += num_long
        step.budget.take(num_tokens=num_tokens, num_seqs=group.num_seqs, num_bytes=num_bytes)
        step.chunks[group] = [Chunk(leader, num_tokens, num_bytes, [])]

    def _make_room(self, group: SequenceGroup, step: Step, *, has_choice: bool) -> bool:
        """Preempt running groups that a waiting one outranks, if that gives it the room that it needs.

        Tokens of the step are part of that room; for those nothing is preempted that takes none of them. The group is
        left to another worker instead where that has room for it.
        """
        if not self.waiting.outranks(group, self.waiting.victim(self.running)):
            return False
        elsewhere = self.balancer.place_elsewhere(self.member, group, step.now) if has_choice else None
        if elsewhere is not None:
            self._leave(elsewhere, step)
            return False
        victims: list[SequenceGroup] = []
        candidates = dict(self.running)
        num_tokens, num_seqs = step.budget.num_tokens, step.budget.num_seqs
        while (
            not num_tokens
            or num_seqs < group.num_seqs
            or not self.has_lora_slot(group, without=victims)
            or self.blocks.can_allocate(group, leave_watermark=bool(candidates), without=victims) is not AllocStatus.OK
        ):
            victim = self.waiting.victim(candidates)
            # Blocks that were swapped in within this step are not in their place yet, and cannot be swapped out.
            if step.swap_in or not self.waiting.outranks(group, victim):
                return False
            num_tokens += step.num_tokens_of(victim)
            if not num_tokens:
                return False
            del candidates[victim]
            victims.append(victim)
            num_seqs += victim.num_seqs
        self._unfold(step)
        for victim in victims:
            self._preempt(victim, step)
        return True

    def _unfold(self, step: Step) -> None:
        """Write a plan that was repeated as chunks, of which some can be taken out again."""
        repeated: dict[SequenceGroup, list[Chunk]] = {}
        for sequence, num_tokens, _ in step.steady:
            repeated.setdefault(sequence.group, []).append(Chunk(sequence, num_tokens, 0, []))
        step.chunks = repeated | step.chunks
        step.steady, step.needy = [], []

    def _preempt(self, group: SequenceGroup, step: Step) -> None:
        chunks = step.chunks.pop(group, [])
        step.budget.give_back(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_seqs=group.num_seqs,
            num_bytes=sum(chunk.num_bytes for chunk in chunks),
        )
        step.num_long -= sum(chunk.sequence.num_uncomputed_tokens > self._max_chunk for chunk in chunks)
        # Blocks that were to be copied on write in this step have nothing in them yet that could be swapped out, and
        # beams that are swapped out could not be forked when the answer to their step in flight comes. A suspect would
        # come back from there among the others.
        is_bound = (
            group.is_suspect
            or any(chunk.copies for chunk in chunks)
            or (group.beams is not None and any(s.num_stored_tokens < s.num_computed_tokens for s in group.live))
        )
        mode = PreemptionMode.RECOMPUTE if is_bound else self._preemption_mode(group)
        self.num_preemptions[mode] += 1
        step.num_preempted += 1
        self._steady = None
        if mode is PreemptionMode.SWAP:
            group.num_swaps += 1
            step.swap_out += self.blocks.swap_out(group)
            self._stop_running(group)
            self.swapped[group] = None
            self.swapped.move_to_end(group, last=False)
            group.swapped_at = step.now
            for sequence in group.live:
                sequence.status = SequenceStatus.SWAPPED
                sequence.draft_token_ids = []  # what it takes to come back must not depend on guesses
        else:
            group.num_recomputes += 1
            self._preempted.extend(sequence.id for sequence in group.live if sequence.is_known)
            self._release(group)
            self.waiting.put_back([group])

    def _preemption_mode(self, group: SequenceGroup) -> PreemptionMode:
        config = self.config
        if config.preemption_mode is PreemptionMode.RECOMPUTE or not self.blocks.can_swap_out(group):
            return PreemptionMode.RECOMPUTE
        if config.preemption_mode is PreemptionMode.SWAP:
            return PreemptionMode.SWAP
        swap = self.blocks.num_swap_copies(group) * config.block_bytes * config.prefill_tokens_per_second
        recompute = self.blocks.num_tokens_to_recompute(group) * config.swap_bytes_per_second
        return PreemptionMode.SWAP if swap < recompute else PreemptionMode.RECOMPUTE

    def _ignore(self, group: SequenceGroup, step: Step) -> None:
        group.error = (
            f"the request's {group.num_seqs} sequence(s) of up to "
            f"{group.max_num_tokens(self.blocks.sizes.max_sequence_tokens)} tokens do not fit the worker, which has "
            f"{self.config.num_device_blocks} blocks of {self.config.block_size} tokens and "
            f"{self.config.max_num_seqs} sequences; ask for fewer or shorter outputs"
        )
        for sequence in group.live:
            self.finish_sequence(sequence, SequenceStatus.FINISHED_IGNORED)
        step.ignored.append(group)
