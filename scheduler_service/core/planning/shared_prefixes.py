"""Lets requests share a prefix that is being computed.

A block is published when the chunk that fills it is planned. A request that is admitted later in the same step finds
the block. Later blocks of a running request's prompt, which no step computes yet, are called expected.

If the next block of a waiting request is expected, the waiting request is not admitted yet. The running request
computes the block, and no tokens are computed twice. While the running request makes progress, the wait costs no time,
because the running request comes first in every step anyway.

A wait has a time limit: the seconds to compute the rest of the waiting request's prompt after the running requests. The
limit of a wait starts anew if another block of the waiting request is published, or if another request gives up waiting
for the same block. While a request waits, its sequences count as running, up to half of the step's sequences. So later
requests do not take the place of a waiting request.

A step stops looking at waiting requests after it has looked up `MAX_LOOKED_UP` block hashes.
"""

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.groups.records import PrefixWait
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.planning.step import Chunk, Step
from scheduler_service.core.planning.worker_groups import Session

MAX_LOOKED_UP = 1 << 12
"""Block hashes in one step. A waiting request needs about five lookups or comparisons, and more if its prefix has
grown. Blocks that were found for one request are not looked up for the next one."""


class SharedPrefixes:
    """Publishes the blocks that planned steps compute, and decides which waiting requests wait for a block."""

    def __init__(self, session: Session) -> None:
        self._worker = session.worker
        self._blocks = session.blocks
        self._groups = session.groups
        self._balancer = session.balancer
        self._member = session.member

    def planned(self, chunk: Chunk, step: Step) -> None:
        """Publish the blocks that a planned or grown chunk fills, and expect the blocks of the remaining known tokens.

        If a chunk has a single token, its block is published when the step is answered, as in steady decodes.
        """
        sequence = chunk.sequence
        if chunk.num_tokens > 1 or sequence.is_encoder:
            num_tokens = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
            step.filled.update(self._blocks.cache.publish(sequence, num_tokens))
        if sequence.num_uncomputed_tokens > 1:
            self._blocks.cache.expect(sequence)

    def taken_back(self, chunks: list[Chunk]) -> None:
        """Withdraw the blocks of chunks that were taken out of the step. No other group may share the withdrawn blocks
        (see `is_tied`)."""
        for chunk in chunks:
            self._blocks.cache.take_back(chunk.sequence)

    def is_tied(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a group shares blocks that this step fills with another group. A group that shares such blocks cannot
        leave the step."""
        return bool(step.filled) and self._blocks.shares_any(group, step.filled)

    def may_look(self, step: Step) -> bool:
        """Whether a step may look up the blocks of another waiting group."""
        return step.num_looked_up < MAX_LOOKED_UP

    def awaits(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a waiting group waits for a block that another group on this worker will compute.

        If several groups have waited long enough for the same block, one of them gives up in each step. The group that
        gives up computes the prefix too. The other groups wait for whichever group computes the block first. Blocks
        that the last look found are not looked up again.
        """
        leader, wait = group.live[0], group.placement.prefix_waits.get(self._worker)
        if step.runs is None:
            step.runs = FoundRuns(self._blocks.device)
        look = self._blocks.cache.look_up(leader, 0 if wait is None else wait.first, step.runs)
        step.num_looked_up += look.num_looked_up
        if look.awaited is None:
            return False
        has_given_up = look.awaited in step.given_up
        # A new wait starts: another block is missing, or another group gave up.
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

    def _backlog(self) -> int:
        """Known tokens that running sequences have not computed yet."""
        return sum(
            max(0, sequence.num_tokens - sequence.num_computed_tokens)
            for group in self._groups.running
            for sequence in group.live
            if sequence.id in self._blocks.tables
        )
