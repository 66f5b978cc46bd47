"""Lets requests share a prefix that is being computed.

A block is published when the chunk that fills it is planned, so later requests of the same step find it. A request
whose next block is expected waits, so no tokens are computed twice. The running request comes first in every step
anyway.

A wait lasts at most the expected seconds to compute the rest of the prompt after the running requests. The limit starts
anew with each further block, or if another request gives up waiting for the same block. Waiting requests reserve at
most half of a step's sequences.
"""

import itertools
from collections.abc import Iterator

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.groups.records import PrefixWait
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.planning.step import Chunk, Step
from scheduler_service.core.planning.worker_groups import Session

MAX_LOOKED_UP = 1 << 12
"""Block hashes that a step looks up or compares. A waiting request needs about five."""


class SharedPrefixes:
    def __init__(self, session: Session) -> None:
        self._worker = session.worker
        self._blocks = session.blocks
        self._groups = session.groups
        self._balancer = session.balancer
        self._member = session.member

    def planned(self, chunk: Chunk, step: Step) -> None:
        """Publish the blocks that a chunk fills, and expect those of the remaining known tokens. The block of a single
        token is published when the step is answered."""
        sequence = chunk.sequence
        if chunk.num_tokens > 1 or sequence.is_encoder:
            num_tokens = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
            if self._blocks.states and sequence.sampling.form:
                num_tokens = min(num_tokens, sequence.num_tokens - 1)  # a late sequence's last token is not computed
            step.filled.update(self._blocks.cache.publish(sequence, num_tokens))
        if sequence.num_uncomputed_tokens > 1:
            self._blocks.cache.expect(sequence)

    def taken_back(self, chunks: list[Chunk]) -> None:
        """Unpublish the blocks of chunks that were taken out of the step. No other group may share the blocks."""
        for chunk in chunks:
            self._blocks.cache.take_back(chunk.sequence)

    def is_tied(self, group: SequenceGroup, step: Step) -> bool:
        """Whether the group shares a block that this step fills, and so cannot be removed from the step."""
        return bool(step.filled) and self._blocks.shares_any(group, step.filled)

    def may_look(self, step: Step) -> bool:
        return step.num_looked_up < MAX_LOOKED_UP

    def awaits(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a waiting group waits for a block that another group on this worker will compute.

        Of the groups that have waited long enough for a block, one gives up in each step and computes the block itself.
        """
        leader, wait = group.live[0], group.placement.prefix_waits.get(self._worker)
        if step.runs is None:
            step.runs = FoundRuns(self._blocks.device)
        if self._blocks.states:
            look = self._blocks.states.await_prefix(leader, self._computing(step))
        else:
            look = self._blocks.cache.look_up(leader, 0 if wait is None else wait.first, step.runs)
        step.num_looked_up += look.num_looked_up
        if look.awaited is None:
            return False
        has_given_up = look.awaited in step.given_up
        # A wait starts anew if another block is missing, or if another group gave up.
        if wait is None or look.first != wait.first or has_given_up:
            if step.backlog is None:
                step.backlog = self._backlog()
            num_missing = leader.num_tokens - look.first * self._blocks.block_size
            seconds = self._balancer.times.seconds(step.backlog + num_missing) * 1000 / self._member.speed
            wait = group.placement.prefix_waits[self._worker] = PrefixWait(look.first, step.now + seconds)
        if step.now <= wait.until or has_given_up:
            return True
        step.given_up.add(look.awaited)
        return False

    def _computing(self, step: Step) -> Iterator[tuple[Sequence, int]]:
        """The sequences that compute prompts or keep states, with their numbers of computed tokens after the step."""
        prompts = (group.live[0] for group in step.prompts if group in self._groups.running)
        for sequence in dict.fromkeys(itertools.chain(self._blocks.states.keeping, prompts)):
            if sequence.id in self._blocks.tables and (
                sequence.num_uncomputed_tokens > 1 or sequence in self._blocks.states.keeping
            ):
                planned = [c.num_tokens for c in step.chunks.get(sequence.group, ()) if c.sequence is sequence]
                yield sequence, sequence.num_computed_tokens + sum(planned)

    def _backlog(self) -> int:
        """Known tokens that running sequences have not computed yet."""
        return sum(
            max(0, sequence.num_tokens - sequence.num_computed_tokens)
            for group in self._groups.running
            for sequence in group.live
            if sequence.id in self._blocks.tables
        )
