"""Lets running groups compute their next tokens, and preempts others for them when blocks run out."""

from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.planning.chunk_sizes import ChunkSizes
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.planning.session import Session
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.step import Chunk, Step


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
