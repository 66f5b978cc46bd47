"""Writes a planned step as a `SchedulerOutput`, and updates the sequences in it.

Each fact about a sequence is sent to the worker once: its description in its first step, and then only new entries of
its block table.
"""

from scheduler_service.core.groups.sequence import Sequence
from scheduler_service.core.outputs import BlockTableUpdate, Fork, NewSequence, ScheduledSequence, SchedulerOutput
from scheduler_service.core.planning.step import Step
from scheduler_service.core.planning.worker_groups import Session


class StepWriter:
    def __init__(self, session: Session) -> None:
        self._blocks = session.blocks
        self._groups = session.groups
        self._items = session.items
        self._encoder_cache = session.encoder_cache
        self._in_flight = session.in_flight
        self._prepares_images = session.config.prepares_images
        self._step_id = 0

    def write_nothing(self, step: Step | None = None) -> SchedulerOutput:
        """An empty step, if there is no work, or if the plan of `step` must wait for answers."""
        output = SchedulerOutput(self._step_id + 1)
        if step is not None:
            output.lacking_adapters = [*step.lacking_adapters]
            self._write_placements(step, output)
        return output

    def write(self, step: Step) -> SchedulerOutput:
        """Write the step, whose tokens then count as computed."""
        output = SchedulerOutput(
            self._step_id + 1,
            ignored=step.ignored,
            blocks_to_swap_out=step.swap_out,
            blocks_to_swap_in=step.swap_in,
            prompts_began=step.prompts_began,
            num_tokens=step.num_tokens - sum(step.rooms.values()),
            planned_at=step.now,
            lacking_adapters=[*step.lacking_adapters],
        )
        self._write_steady(step, output)
        scheduled = self._write_chunks(step, output) if step.chunks else []
        output.blocks_to_copy += step.state_copies
        steady = self._write_rooms(step, output) if step.rooms else step.steady
        output.scheduled = steady + scheduled if scheduled else steady
        output.num_samples = len(step.steady) + sum(chunk.samples for chunk in scheduled)
        decodes = output.num_samples == len(output.scheduled) == output.num_tokens and not step.rooms
        output.is_plain = decodes and all(group.beams is None for group in step.chunks)  # `step.steady` has no beams
        output.finished, output.preempted = self._groups.departures()
        if step.placements or step.moved or step.queue.left or step.queue.held:
            self._write_placements(step, output)
        if not output.is_empty:
            output.dropped_items = self._items.take_dropped()
            if self._encoder_cache.encoded or self._encoder_cache.dropped:
                self._encoder_cache.written(output)
        if self._prepares_images:
            self._write_images_ahead(step, output)
        if not output.is_empty:
            self._step_id += 1
            self._in_flight.outputs.append(output)
        return output

    def _write_images_ahead(self, step: Step, output: SchedulerOutput) -> None:
        """A step that would be empty is sent for its answer, if an image is not prepared and no other answer will
        come. In a repeated plan, no sequence needs an image."""
        cache, is_repeated = self._encoder_cache, step.steady and not step.chunks
        ahead = {} if is_repeated else cache.ahead(self._groups.running)
        if not output.is_empty or not (self._in_flight.outputs or cache.are_prepared(ahead)):
            output.images_ahead = ahead
            cache.told(ahead)

    def _write_steady(self, step: Step, output: SchedulerOutput) -> None:
        for sequence in step.needy:
            self._write_table(sequence, output)
        any_last, rooms = False, step.rooms
        for sequence, _, _ in step.steady:
            num_computed = sequence.num_computed_tokens + 1
            if rooms:
                num_computed += rooms.get(sequence, 0)
            sequence.num_computed_tokens = num_computed
            if num_computed + 1 >= sequence.max_num_tokens:
                any_last = True
        step.any_last = any_last

    def _write_rooms(self, step: Step, output: SchedulerOutput) -> list[ScheduledSequence]:
        """Add the room for drafts to `step.steady`, which does not change, because the next step may repeat it."""
        output.num_draft_tokens = step.rooms
        for sequence, room in step.rooms.items():
            sequence.num_draft_tokens += room
        return [ScheduledSequence(s.sequence, 1 + step.rooms.get(s.sequence, 0), True) for s in step.steady]

    def _write_chunks(self, step: Step, output: SchedulerOutput) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        for chunks in step.chunks.values():
            for chunk in chunks:
                sequence, num_tokens = chunk.sequence, chunk.num_tokens
                if sequence.is_encoder:
                    scheduled.append(ScheduledSequence(sequence, num_tokens, False))
                    self._write_table(sequence, output)
                    sequence.num_computed_tokens += num_tokens
                    continue
                if not num_tokens:
                    output.blocks_to_copy += chunk.copies
                    self._write_table(sequence, output)
                    continue
                num_uncomputed = sequence.num_uncomputed_tokens
                room = step.rooms.get(sequence, 0)
                scheduled.append(ScheduledSequence(sequence, num_tokens + room, num_tokens >= num_uncomputed))
                output.blocks_to_copy += chunk.copies
                self._write_table(sequence, output)
                if sequence.group.images:
                    self._encoder_cache.read(sequence, num_tokens)
                sequence.num_computed_tokens += num_tokens + room
                if sequence.group.has_unforked:
                    self._fork_followers(sequence)
        return scheduled

    def _write_placements(self, step: Step, output: SchedulerOutput) -> None:
        queue = step.queue
        output.moved = step.moved
        output.placements = [*step.placements, *queue.left.values()] if queue.left else step.placements
        if queue.left or queue.held:
            output.ask_again_at = queue.ask_again_at(step.now)

    def _fork_followers(self, leader: Sequence) -> None:
        """After the leader's prompt is computed, fork the followers, which compute their first tokens in later steps.

        A follower without output computes the last prompt token itself, because it needs the token's logits. So does
        every follower of a leader without output, which may turn out to be late. With states, every follower computes
        that token, because the leader's states change with it.
        """
        group, num_shared = leader.group, leader.num_prompt_tokens
        if self._blocks.states:
            num_shared -= 1
        if leader.num_computed_tokens < num_shared:
            return
        group.has_unforked = False
        for follower in group.live:
            if follower.id not in self._blocks.tables:
                num_last = min(leader.num_tokens, follower.num_tokens) - 1
                self._blocks.fork(leader, follower, min(num_shared, num_last))
                follower.num_forked_tokens = follower.num_prompt_tokens
                self._encoder_cache.share(leader, follower)

    def _write_table(self, sequence: Sequence, output: SchedulerOutput) -> None:
        """Write what the worker does not know of a sequence and its block table, the encoder's input first."""
        encoder = sequence.group.encoder
        if encoder is not None and encoder is not sequence:
            self._write_table(encoder, output)
        parts = self._blocks.tell(sequence, whole=not sequence.is_known)
        if sequence.is_known:
            for number, start, entries in parts:
                output.block_table_updates.append(BlockTableUpdate(sequence.id, start, entries, number))
            return
        sequence.is_known = True
        table, *further = [entries for _, _, entries in parts]
        num_computed = sequence.num_computed_tokens
        parent, sequence.forked_from = sequence.forked_from, None
        if parent is not None and parent.is_known:
            num_forked = sequence.num_forked_tokens
            output.forks.append(Fork(parent.id, sequence, num_forked, table, num_computed, further))
        else:
            sent = self._items_to_send(sequence) if sequence.group.items else frozenset()
            output.new_sequences.append(NewSequence(sequence, table, num_computed, further, sent))

    def _items_to_send(self, sequence: Sequence) -> frozenset[bytes]:
        """The last prompt token may be computed again: by a follower, or by a late sequence."""
        first = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)
        needed = [item for item in sequence.group.items if item.stop > first]
        return self._items.hold(sequence.group, needed)
