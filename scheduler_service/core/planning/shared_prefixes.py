"""Lets requests share a prefix that is being computed.

A block is published in the prefix cache when the chunk that fills it is planned. A request that is admitted later in
the same step finds this block. Later blocks of a running request's prompt, which no step computes yet, are called
expected.

If the next block of a waiting request is expected, the waiting request is not admitted yet. The running request
computes the expected block, so no tokens are computed twice. While the running request makes progress, waiting for its
blocks costs no time, because the running request comes first in every step anyway.

The wait for a prefix has a time limit: the expected seconds to compute the rest of the waiting request's prompt after
the running requests. The time limit of a wait starts anew if another block of the waiting request is published, or if
another request gives up waiting for the same block. While a request waits for a prefix, its sequences count as running,
so that later requests do not take its place. At most half of a step's sequences are reserved for requests that wait for
a prefix.

A step stops looking at waiting requests after it has looked up `MAX_LOOKED_UP` block hashes.
"""

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.groups.records import PrefixWait
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.planning.step import Chunk, Step
from scheduler_service.core.planning.worker_groups import Session

MAX_LOOKED_UP = 1 << 12
"""Maximum number of block hashes that a step looks up or compares. A waiting request needs about five lookups or
comparisons, and more if its prefix has grown. Blocks that were found for one request are not looked up for the next
request."""


class SharedPrefixes:
    """Publishes the blocks that planned steps compute, and decides which waiting requests wait for a block."""

    def __init__(self, session: Session) -> None:
        self._worker = session.worker
        self._blocks = session.blocks
        self._groups = session.groups
        self._balancer = session.balancer
        self._member = session.member

    def planned(self, chunk: Chunk, step: Step) -> None:
        """Publish the blocks that a planned or grown chunk fills, and mark the blocks of the sequence's remaining known
        tokens as expected.

        If a chunk has a single token, its block is published when the step is answered, as in steady decodes.
        """
        sequence = chunk.sequence
        if chunk.num_tokens > 1 or sequence.is_encoder:
            num_tokens = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
            step.filled.update(self._blocks.cache.publish(sequence, num_tokens))
        if sequence.num_uncomputed_tokens > 1:
            self._blocks.cache.expect(sequence)

    def taken_back(self, chunks: list[Chunk]) -> None:
        """Remove the blocks of chunks that were taken out of the step from the prefix cache. No other group may share
        these blocks (see `is_tied`)."""
        for chunk in chunks:
            self._blocks.cache.take_back(chunk.sequence)

    def is_tied(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a group and another group share a block that this step fills. Groups that share such a block cannot
        be removed from the step."""
        return bool(step.filled) and self._blocks.shares_any(group, step.filled)

    def may_look(self, step: Step) -> bool:
        """Whether a step may look up the blocks of another waiting group."""
        return step.num_looked_up < MAX_LOOKED_UP

    def awaits(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a waiting group waits for a block that another group on this worker will compute.

        If several groups have waited long enough for the same block, one of them gives up in each step. The group that
        gives up computes the prefix itself. The other groups wait for whichever group computes the block first. Blocks
        that the group's last lookup found are not looked up again.
        """
        leader, wait = group.live[0], group.placement.prefix_waits.get(self._worker)
        if step.runs is None:
            step.runs = FoundRuns(self._blocks.device)
        look = self._blocks.cache.look_up(leader, 0 if wait is None else wait.first, step.runs)
        step.num_looked_up += look.num_looked_up
        if look.awaited is None:
            return False
        has_given_up = look.awaited in step.given_up
        # A new wait starts if another block is missing, or if another group gave up.
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
        """Number of known tokens that running sequences have not computed yet."""
        return sum(
            max(0, sequence.num_tokens - sequence.num_computed_tokens)
            for group in self._groups.running
            for sequence in group.live
            if sequence.id in self._blocks.tables
        )
