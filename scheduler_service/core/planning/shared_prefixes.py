"""Lets requests share a prefix that is being computed.

A block is published when the chunk that fills it is planned, so a request that is admitted later in the same step finds
it. The later blocks of a running request's prompt are expected. If the next block of a waiting request is expected, the
waiting request is not admitted yet: the running request computes the block, and no tokens are computed twice. The wait
costs no time while the running request makes progress, because the running request comes first in every step anyway. A
request waits for at most the time that computing the expected tokens would take. That time begins anew only when fewer
tokens are left.
"""

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.planning.session import Session
from scheduler_service.core.planning.step import Chunk, Step


class SharedPrefixes:
    """Publishes what steps are planned to compute, and says which waiting requests wait for it."""

    def __init__(self, session: Session) -> None:
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
        """Whether a waiting group is to wait for tokens that others are going to compute."""
        num_tokens = self._blocks.num_awaited_tokens(group.live[0])
        if not num_tokens:
            return False
        if group.prefix_wait is None or num_tokens < group.prefix_wait[0]:
            seconds = self._balancer.times.seconds(num_tokens) * 1000 / self._member.speed
            group.prefix_wait = num_tokens, step.now + seconds
        return step.now <= group.prefix_wait[1]
