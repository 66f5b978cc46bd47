"""Lets requests share a prefix that is being computed.

A block is published when the chunk that fills it is planned, so a request that is admitted later in the same step finds
it. The later blocks of a running request's prompt are expected. If the next block of a waiting request is expected, the
waiting request is not admitted yet: the running request computes the block, and no tokens are computed twice. The wait
costs no time while the running request makes progress, because the running request comes first in every step anyway. A
request waits for at most the time that computing the rest of its own prompt would take. That time begins anew only when
fewer tokens are missing than ever before.
"""

from scheduler_service.core.groups.sequence import PrefixWait, SequenceGroup
from scheduler_service.core.planning.session import Session
from scheduler_service.core.planning.step import Chunk, Step


class SharedPrefixes:
    """Publishes what steps are planned to compute, and says which waiting requests wait for it."""

    def __init__(self, session: Session) -> None:
        self._worker = session.worker
        self._blocks = session.blocks
        self._balancer = session.balancer
        self._member = session.member

    def planned(self, chunk: Chunk, step: Step) -> None:
        """Publish the blocks that a planned or grown chunk fills, and expect the rest of the sequence's known tokens.

        The block of a single token is published when the step is answered, as in steady decodes.
        """
        sequence = chunk.sequence
        if chunk.num_tokens > 1 or sequence.is_encoder:
            num_tokens = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
            step.filled.update(self._blocks.publish(sequence, num_tokens))
        self._blocks.expect(sequence)

    def taken_back(self, chunks: list[Chunk]) -> None:
        """Chunks have been taken out of the step that was planned; no other group may be `tied` to theirs."""
        for chunk in chunks:
            self._blocks.take_back(chunk.sequence)

    def is_tied(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a group shares blocks that this step fills with another one, so that neither can leave the step."""
        return bool(step.filled) and self._blocks.shares_any(group, step.filled)

    def awaits(self, group: SequenceGroup, step: Step) -> bool:
        """Whether a waiting group is to wait for a block that another group is going to compute here.

        A look takes a few microseconds: blocks that were found in the last one are not looked for again.
        """
        leader, wait = group.live[0], group.prefix_wait
        start = wait.first if wait is not None and wait.worker == self._worker else 0
        first = self._blocks.first_awaited(leader, start)
        if first is None:
            return False
        num_missing = leader.num_tokens - first * self._blocks.block_size
        if wait is None or num_missing < wait.num_missing:
            seconds = self._balancer.times.seconds(num_missing) * 1000 / self._member.speed
            group.prefix_wait = PrefixWait(self._worker, first, num_missing, step.now + seconds)
        else:
            group.prefix_wait = wait._replace(worker=self._worker, first=first)
        return step.now <= group.prefix_wait.until
