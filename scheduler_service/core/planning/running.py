"""Lets running groups compute their next tokens, and preempts others for them when blocks run out.

`ChunkSizes` says how many tokens each sequence of a group computes before all others had their turn; waiting groups
start with chunks of the same sizes. What is left of a step when all else has been planned is room for drafts, which
`DraftRoom` hands out. So no token, no prompt and no block waits for a draft that may turn out to be wrong.
"""

from scheduler_service.core.config import PhaseRule
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.step import Chunk, Step, bytes_to_tell
from scheduler_service.core.planning.worker_groups import Session


class ChunkSizes:
    """Bounds a chunk by the step's tokens and bytes, and by `max_chunk` while others want a share of the step."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self.max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self._is_separate = config.phase_rule is PhaseRule.SEPARATE
        self._is_encoder = config.is_encoder
        self._blocks = session.blocks

    def of(self, group: SequenceGroup, step: Step) -> list[Chunk]:
        """The chunks that fit the step now; nothing is taken of it yet.

        Each long chunk takes half as many tokens as the one before it, the first `max_chunk` of them. So all of them
        together leave room in the step for what is shorter, however many there are. A follower has no table before its
        leader's prompt is done. What the group's encoder reads comes first, and whole; nothing else does before it.
        """
        num_tokens_left, num_bytes_left, num_long = step.budget.num_tokens, step.budget.num_bytes, step.num_long
        chunks: list[Chunk] = []
        encoder, encoder_bytes = group.encoder, 0
        if encoder is not None:
            if not encoder.num_known_blocks:
                encoder_bytes = bytes_to_tell(encoder, len(self._blocks.tables[encoder.id]))
            if not encoder.is_computed:
                has_room = encoder.num_prompt_tokens <= step.budget.num_encoder_tokens
                if not has_room or (encoder_bytes and num_bytes_left <= 0):
                    return []
                chunks.append(Chunk(encoder, encoder.num_prompt_tokens, encoder_bytes))
                num_bytes_left, encoder_bytes = num_bytes_left - encoder_bytes, 0
        for sequence in self._due(group):
            num_tokens = sequence.num_uncomputed_tokens
            is_long = num_tokens > self.max_chunk and not self._is_encoder
            if is_long:
                num_tokens = max(1, self.max_chunk >> num_long)
            if not self._is_encoder:
                num_tokens = min(num_tokens, num_tokens_left)
            elif num_tokens > num_tokens_left:
                continue
            if num_tokens and sequence.id in self._blocks.tables:
                num_bytes = 0
                if not sequence.num_known_blocks:
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

    def _due(self, group: SequenceGroup) -> list[Sequence]:
        """The live sequences; with separate phases those that are behind first, so that none decodes among them."""
        live = group.live
        if not self._is_separate or len(live) == 1:
            return live
        return [s for s in live if s.num_uncomputed_tokens > 1 and s.id in self._blocks.tables] or live


class RunningPlanner:
    """Their sequences are taken of the budget before; this takes tokens and bytes."""

    def __init__(
        self, session: Session, chunk_sizes: ChunkSizes, preemption: Preemption, prefixes: SharedPrefixes
    ) -> None:
        self._blocks = session.blocks
        self._groups = session.groups
        self._chunk_sizes = chunk_sizes
        self._preemption = preemption
        self._prefixes = prefixes

    def split(self, step: Step) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """Groups that are ready to decode, and those that are behind."""
        ready: list[SequenceGroup] = []
        behind: list[SequenceGroup] = []
        for group in self._groups.running:
            (behind if group.is_behind else ready).append(group)
        step.prompts += behind
        return ready, behind

    def schedule(self, groups: list[SequenceGroup], step: Step) -> None:
        """Let groups compute in this order; one that was preempted for an earlier one is passed over."""
        for group in groups:
            if group in self._groups.running:
                self.schedule_one(group, step)

    def schedule_one(self, group: SequenceGroup, step: Step) -> None:
        """Let a group compute what the step has room for, unless it is preempted itself, or outgrows the worker."""
        if group.live[0].id not in self._blocks.tables:  # its leader ended before the others could fork
            step.budget.give_back(num_seqs=group.num_seqs)
            step.prompts = [other for other in step.prompts if other is not group]  # it may be new again, as the last
            self._groups.give_back(group)
            return
        chunks = self._chunk_sizes.of(group, step)
        while not self._blocks.can_append_slots(
            (chunk.sequence, chunk.num_tokens) for chunk in chunks if not chunk.sequence.is_encoder
        ):
            if len(self._groups.running) == 1:
                step.budget.give_back(num_seqs=group.num_seqs)
                self._groups.ignore(group)
                step.ignored.append(group)
                return
            if self._preemption.preempt_one(step) is group:
                return
            chunks = self._chunk_sizes.of(group, step)
        for chunk in chunks:
            if chunk.sequence.is_encoder:
                continue  # it has all its blocks
            chunk.copies = self._blocks.append_slots(chunk.sequence, chunk.num_tokens)
        if chunks:
            step.take(group, chunks)
        for chunk in chunks:
            self._prefixes.planned(chunk, step)

    def hand_out_rest(self, step: Step) -> None:
        """Let prompts compute more than the first chunk that they were given, in order, with what all others left.

        Also where no prompt is too long for the step: a group that was preempted after its turn gives tokens back.
        """
        if not step.budget.num_tokens:
            return
        for group in step.prompts:
            for chunk in step.chunks.get(group, ()):
                self._extend(chunk, step)

    def _extend(self, chunk: Chunk, step: Step) -> None:
        sequence: Sequence = chunk.sequence
        more = min(sequence.num_uncomputed_tokens - chunk.num_tokens, step.budget.num_tokens)
        num_tokens = chunk.num_tokens + more
        if more > 0 and self._blocks.extend_slots(sequence, num_tokens):
            step.budget.take(num_tokens=more)
            chunk.num_tokens = num_tokens
            self._prefixes.planned(chunk, step)


class DraftRoom:
    """Room for drafts in one worker's steps: tokens in equal shares, and blocks that are free above the watermark."""

    def __init__(self, session: Session) -> None:
        self._blocks = session.blocks
        self._max_num_batched_tokens = session.config.max_num_batched_tokens

    def hand_out(self, step: Step) -> None:
        """Note in `step.rooms` how many draft tokens each decoding sequence has room for, of those its worker wants."""
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
        """Half of what is left of the output at most, so that further steps can be planned before what became of these
        drafts is known. With those in flight no more than a chunk of a prompt could be, for which there are blocks,
        also where a window lets go of others."""
        num_left = sequence.max_num_tokens - sequence.num_computed_tokens - 2  # the last token is never computed
        num_in_flight = sequence.num_draft_tokens + 1
        return min(sequence.num_draft_tokens_wanted, num_left // 2, self._max_num_batched_tokens - num_in_flight)

    def _within_blocks(self, step: Step, sequence: Sequence, room: int) -> int:
        """The room, or as much of it as the sequence has blocks for, if others are wanted for something else."""
        blocks, num_tokens = self._blocks, sequence.num_computed_tokens + 1
        num_new = blocks.sizes.blocks_ahead(num_tokens + room) - len(blocks.tables[sequence.id])
        if num_new > max(0, blocks.device.num_free - blocks.num_watermark_blocks):
            return min(room, sequence.num_slots - num_tokens)
        if num_new > 0:
            blocks.extend_slots(sequence, 1 + room)
            step.needy.append(sequence)
        return room
