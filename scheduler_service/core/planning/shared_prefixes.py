"""Lets requests share a prefix that is being computed.

A block is published when the chunk that fills it is planned, so a request that is admitted later in the same step finds
it. The later blocks of a running request's prompt are expected. If the next block of a waiting request is expected, the
waiting request is not admitted yet: the running request computes the block, and no tokens are computed twice. The wait
costs no time while the running request makes progress, because the running request comes first in every step anyway. A
request waits for at most the time that computing the rest of its own prompt would take behind what runs. That time
begins anew when another of its blocks is there, or when another request has given up waiting for the same block. While
it waits, its sequences count as if they ran, up to half of all, so that those behind it take no place from it.

A step's look at the waiting requests ends when `MAX_LOOKED_UP` block hashes were looked up.
"""

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.groups.records import PrefixWait
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.planning.step import Chunk, Step
from scheduler_service.core.planning.worker_groups import Session

MAX_LOOKED_UP = 1 << 12
"""Block hashes, in one step. For a request that waits about five are looked up or compared, and more if its prefix has
grown: what was found for one is not looked up for others."""


class SharedPrefixes:
    """Publishes what steps are planned to compute, and says which waiting requests wait for it."""

    def __init__(self, session: Session) -> None:
        self._worker = session.worker
        self._blocks = session.blocks
        self._groups = session.groups
        self._balancer = session.balancer
        self._member = session.member

    def planned(self, chunk: Chunk, step: Step) -> None:
        """Publish the blocks that a planned or grown chunk fills, and expect the rest of the sequence's known tokens.

        The block of a single token is published when the step is answered, as in steady decodes, and not expected.
        """
        sequence = chunk.sequence
        if chunk.num_tokens > 1 or sequence.is_encoder:
            num_tokens = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
            step.filled.update(self._blocks.cache.publish(sequence, num_tokens))
        if sequence.num_uncomputed_tokens > 1:
            self._blocks.cache.expect(sequence)

    def taken_back(self, chunks: list[Chunk]) -> None:
        """Chunks have been taken out of the step that was planned; no other group may be `tied` to theirs."""
        for chunk in chunks:
            self._blocks.cache.take_back(chunk.sequence)

    def is_tied(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a group shares blocks that this step fills with another one, so that neither can leave the step."""
        return bool(step.filled) and self._blocks.shares_any(group, step.filled)

    def may_look(self, step: Step) -> bool:
        """Whether a step may look at another waiting group."""
        return step.num_looked_up < MAX_LOOKED_UP

    def awaits(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a waiting group is to wait for a block that another group is going to compute here.

        Of those whose time is over one gives up in a step for each block: it computes the prefix too, and the others
        wait for either. Blocks that were found in the last look are not looked up again.
        """
        leader, wait = group.live[0], group.placement.prefix_waits.get(self._worker)
        if step.runs is None:
            step.runs = FoundRuns(self._blocks.device)
        look = self._blocks.cache.look_up(leader, 0 if wait is None else wait.first, step.runs)
        step.num_looked_up += look.num_looked_up
        if look.awaited is None:
            return False
        has_given_up = look.awaited in step.given_up
        if wait is None or look.first != wait.first or has_given_up:  # otherwise nothing has changed
            if step.backlog is None:
                step.backlog = self._backlog()
            num_missing = leader.num_tokens - look.first * self._blocks.block_size
            seconds = self._balancer.times.seconds(step.backlog + num_missing) * 1000 / self._member.speed
            wait = group.placement.prefix_waits[self._worker] = PrefixWait(look.first, step.now + seconds)
        if step.now <= wait.until or has_given_up:
            return True
        step.given_up.add(look.awaited)
        return False

    def _backlog(self) -> int:
        """Known tokens that running sequences have yet to compute."""
        return sum(
            max(0, sequence.num_tokens - sequence.num_computed_tokens)
            for group in self._groups.running
            for sequence in group.live
            if sequence.id in self._blocks.tables
        )
