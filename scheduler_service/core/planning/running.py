"""Schedules the next tokens of running groups, and preempts other groups if blocks run out.

Chunks get their first sizes, then prompts get the tokens that are left, and then drafts. Drafts, which may be rejected,
therefore never delay a prompt or take its blocks.
"""

from scheduler_service.core.config import PhaseRule
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ScheduledSequence
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.step import Chunk, Step, bytes_to_tell
from scheduler_service.core.planning.worker_groups import Session


class ChunkSizes:
    """Limits a chunk to the step's tokens, bytes and images, and to `max_chunk` while other sequences need tokens. With
    windows, this limit always holds, because a sequence needs blocks for its windows and its chunk together."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self.max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self._max_extended = self.max_chunk if config.has_windows else config.max_num_batched_tokens
        self._is_separate = config.phase_rule is PhaseRule.SEPARATE
        self._is_encoder = config.is_encoder
        self._blocks = session.blocks
        self._encoder_cache = session.encoder_cache

    def due(self, sequence: Sequence) -> int:
        """Tokens of a sequence's next chunk without other limits. With states, a chunk ends where they are forked or
        kept for the prefix cache."""
        num_tokens = sequence.num_uncomputed_tokens
        if num_tokens > 1 and self._blocks.states:
            start = sequence.num_computed_tokens
            return self._blocks.states.end_of_chunk(sequence, start + num_tokens) - start
        return num_tokens

    def of(self, group: SequenceGroup, step: Step) -> list[Chunk]:
        """The chunks of a group that fit the step now. The budget does not change.

        Each long chunk has at most half as many tokens as the long chunk before, to leave room for short chunks. A
        follower has no chunk before its leader's prompt is computed. The encoder's input comes first, and is never
        divided. A chunk without tokens tells the worker of a sequence whose first token needs an image.
        """
        num_tokens_left, num_bytes_left, num_long = step.budget.num_tokens, step.budget.num_bytes, step.num_long
        chunks: list[Chunk] = []
        encoder, encoder_bytes = group.encoder, 0
        if encoder is not None:
            if not self._blocks.is_told(encoder):
                encoder_bytes = bytes_to_tell(encoder, len(self._blocks.tables[encoder.id]))
            if not encoder.is_computed:
                has_room = encoder.num_prompt_tokens <= step.budget.num_encoder_tokens
                if not has_room or (encoder_bytes and num_bytes_left <= 0):
                    return []
                chunks.append(Chunk(encoder, encoder.num_prompt_tokens, encoder_bytes))
                num_bytes_left, encoder_bytes = num_bytes_left - encoder_bytes, 0
        for sequence in self._due(group):
            num_tokens = self.due(sequence)
            is_long = num_tokens > self.max_chunk and not self._is_encoder
            if is_long:
                num_tokens = max(1, self.max_chunk >> num_long)
            if not self._is_encoder:
                num_tokens = min(num_tokens, num_tokens_left)
            elif num_tokens > num_tokens_left:
                continue
            if group.images:
                start, reach = sequence.num_computed_tokens, self._encoder_cache.reach
                num_tokens = reach(group.images, start, num_tokens, num_tokens_left)
            is_told = bool(num_tokens or (group.images and not sequence.is_known))
            if is_told and sequence.id in self._blocks.tables:
                num_bytes = 0
                if not self._blocks.is_told(sequence):
                    if num_bytes_left <= 0:
                        continue
                    num_entries = self._blocks.num_table_entries(sequence, num_tokens)
                    num_bytes = encoder_bytes + bytes_to_tell(sequence, num_entries)
                    encoder_bytes = 0
                    num_bytes_left -= num_bytes
                chunks.append(Chunk(sequence, num_tokens, num_bytes, is_long=is_long))
                num_long += is_long
                num_tokens_left -= num_tokens
        return chunks

    def planned(self, chunk: Chunk) -> None:
        """Use the images that a chunk touches. Call this again if the chunk is extended."""
        if chunk.num_tokens and chunk.sequence.group.images and not chunk.sequence.is_encoder:
            self._encoder_cache.use(chunk.sequence, chunk.num_tokens)

    def extended(self, chunk: Chunk, num_tokens: int) -> int:
        """The tokens of a planned chunk that `num_tokens` further tokens could join."""
        sequence = chunk.sequence
        num_tokens = min(self.due(sequence), chunk.num_tokens + num_tokens, self._max_extended)
        if num_tokens > chunk.num_tokens and (images := sequence.group.images):
            num_tokens = self._encoder_cache.reach(images, sequence.num_computed_tokens, num_tokens)
        return num_tokens

    def _due(self, group: SequenceGroup) -> list[Sequence]:
        """The live sequences that may be scheduled. With separate phases, a prefill step gets only sequences with
        several uncomputed tokens."""
        live = group.live
        if not self._is_separate or len(live) == 1:
            return live
        return [s for s in live if s.num_uncomputed_tokens > 1 and s.id in self._blocks.tables] or live


class RunningPlanner:
    """Schedules running groups, whose sequences were taken from the budget already."""

    def __init__(
        self, session: Session, chunk_sizes: ChunkSizes, preemption: Preemption, prefixes: SharedPrefixes
    ) -> None:
        self._blocks = session.blocks
        self._groups = session.groups
        self._chunk_sizes = chunk_sizes
        self._preemption = preemption
        self._prefixes = prefixes

    def split(self, step: Step) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """The groups that decode next, and the groups that are behind (`SequenceGroup.is_behind`)."""
        ready: list[SequenceGroup] = []
        behind: list[SequenceGroup] = []
        for group in self._groups.running:
            (behind if group.is_behind else ready).append(group)
        step.prompts += behind
        return ready, behind

    def schedule(self, groups: list[SequenceGroup], step: Step) -> None:
        """Schedule groups in order, without those that were preempted for an earlier group."""
        for group in groups:
            if group in self._groups.running:
                self.schedule_one(group, step)

    def schedule_one(self, group: SequenceGroup, step: Step) -> None:
        """Schedule as many tokens as the step has room for. If blocks run out, the group itself can be preempted or
        ended."""
        if group.live[0].id not in self._blocks.tables:  # the leader ended before its followers forked
            step.budget.give_back(num_seqs=group.num_seqs)
            step.prompts = [other for other in step.prompts if other is not group]
            self._groups.give_back(group)
            return
        chunks = self._chunk_sizes.of(group, step)
        while not self._blocks.can_append_slots(
            (chunk.sequence, chunk.num_tokens) for chunk in chunks if not chunk.sequence.is_encoder
        ):
            if len(self._groups.running) == 1:
                if self._blocks.states.keeping:
                    self._blocks.states.forget_kept()
                    continue
                step.budget.give_back(num_seqs=group.num_seqs)
                self._groups.ignore(group)
                step.ignored.append(group)
                return
            if self._preemption.preempt_one(step) is group:
                return
            chunks = self._chunk_sizes.of(group, step)
        for chunk in chunks:
            if chunk.sequence.is_encoder:
                continue  # has all its blocks already
            chunk.copies = self._blocks.append_slots(chunk.sequence, chunk.num_tokens)
        if chunks:
            step.take(group, chunks)
        for chunk in chunks:
            self._chunk_sizes.planned(chunk)
            self._prefixes.planned(chunk, step)

    def hand_out_rest(self, step: Step) -> None:
        """Give prompts the tokens that are left, in order. A group that is preempted after its turn leaves tokens,
        too."""
        if not step.budget.num_tokens:
            return
        for group in step.prompts:
            for chunk in step.chunks.get(group, ()):
                self._extend(chunk, step)

    def _extend(self, chunk: Chunk, step: Step) -> None:
        sequence: Sequence = chunk.sequence
        num_tokens = self._chunk_sizes.extended(chunk, step.budget.num_tokens)
        if num_tokens > chunk.num_tokens and self._blocks.extend_slots(sequence, num_tokens):
            step.budget.take(num_tokens=num_tokens - chunk.num_tokens)
            chunk.num_tokens = num_tokens
            self._chunk_sizes.planned(chunk)
            self._prefixes.planned(chunk, step)


class DraftRoom:
    """Assigns room for drafts: equal shares of the tokens that are left, and free blocks above the watermark."""

    def __init__(self, session: Session) -> None:
        self._blocks = session.blocks
        self._largest_chunk = session.config.largest_chunk

    def hand_out(self, step: Step) -> None:
        """Store in `step.rooms` the number of drafts that each decoding sequence has room for."""
        decoding = [scheduled.sequence for scheduled in step.steady]
        for chunks in step.chunks.values():
            decoding += [c.sequence for c in chunks if c.num_tokens == 1 == c.sequence.num_uncomputed_tokens]
        wanting = [sequence for sequence in decoding if sequence.num_draft_tokens_wanted]
        if not wanting or not (share := step.budget.num_tokens // len(wanting)):
            return
        for sequence in wanting:
            if (room := self._within_blocks(step, sequence, min(share, self._most(sequence)))) > 0:
                step.rooms[sequence] = room
                step.budget.take(num_tokens=room)

    def _most(self, sequence: Sequence) -> int:
        """The maximum number of drafts of a sequence in one step.

        At most half of the remaining output, so that steps can be planned ahead. All drafts in flight together are at
        most as many tokens as a prompt's largest chunk, for which the pool always has blocks.
        """
        # The last token is never computed, only sampled.
        num_left = sequence.max_num_tokens - sequence.num_computed_tokens - 2
        num_in_flight = sequence.num_draft_tokens + 1
        return min(sequence.num_draft_tokens_wanted, num_left // 2, self._largest_chunk - num_in_flight)

    def _within_blocks(self, step: Step, sequence: Sequence, room: int) -> int:
        """The drafts, at most `room`, that the sequence has blocks for, or gets blocks for above the watermark."""
        blocks, num_tokens = self._blocks, sequence.num_computed_tokens + 1
        num_new = blocks.num_new_entries(sequence, 1 + room)
        if num_new > max(0, blocks.device.num_free - blocks.num_watermark_blocks):
            return min(room, sequence.num_slots - num_tokens)
        if num_new > 0:
            blocks.extend_slots(sequence, 1 + room)
            step.needy.append(sequence)
        return room


class SteadyPlan:
    """The plan of steady steps, in which every running sequence computes one token. Most steps are steady.

    The plan is repeated until a sequence computes several tokens, is preempted, or is suspected. Ended sequences may
    stay.
    """

    def __init__(self, session: Session) -> None:
        self._blocks = session.blocks
        self._groups = session.groups
        self._plan: list[ScheduledSequence] | None = None

    def forget(self) -> None:
        self._plan = None

    @property
    def is_known(self) -> bool:
        return self._plan is not None

    def repeat(self, step: Step) -> bool:
        """Repeat the last plan in this step. Returns whether the plan could be repeated."""
        if self._plan is None:
            return False
        running = SequenceStatus.RUNNING
        plan = [scheduled for scheduled in self._plan if scheduled.sequence.status is running]
        if self._groups.swapped or not 0 < len(plan) <= step.budget.num_tokens:
            return False
        needy = [s for s, _, _ in plan if s.num_computed_tokens >= s.num_slots]
        if len(needy) * len(self._blocks.sizes) > self._blocks.device.num_free:
            return False
        for sequence in needy:
            self._blocks.append_slots(sequence, 1)
        step.budget.take(num_tokens=len(plan), num_seqs=self._groups.num_running_seqs)
        step.steady, step.needy = plan, needy
        return True

    def look_ahead(self, step: Step) -> None:
        """After a step is written, check whether the next step is steady."""
        if step.chunks or step.any_last or not step.steady:
            self._plan = self._next_plan(step)

    def _next_plan(self, step: Step) -> list[ScheduledSequence] | None:
        """The plan of the next step; None if it is not steady. Sequences of one group may share the block that they
        write to next, and join only after a fully planned step has copied it."""
        plan = [s for s in step.steady if s.sequence.num_computed_tokens + 1 < s.sequence.max_num_tokens]
        for group in step.chunks if step.steady else self._groups.running:
            prepared = None
            if group.beams is not None:
                return None
            if len(group.sequences) > 1:
                prepared = {chunk.sequence for chunk in step.chunks.get(group, []) if chunk.num_tokens == 1}
            for sequence in group.live:
                num_uncomputed = sequence.num_uncomputed_tokens
                if not self._blocks.is_told(sequence) or group.waits_for_encoder:
                    return None  # the encoder's input filled the step
                if group.images and sequence.num_computed_tokens < sequence.num_prompt_tokens:
                    return None  # the last prompt token may need an image
                if num_uncomputed == 1 and (prepared is None or sequence in prepared):
                    plan.append(ScheduledSequence(sequence, 1, True))
                elif num_uncomputed or sequence.num_computed_tokens + 1 < sequence.max_num_tokens:
                    return None
        return plan or None
