"""Lets requests share a prefix that is being computed.

A block is published when the chunk that fills it is planned, so a request that is admitted later in the same step finds
it. The later blocks of a running request's prompt are expected. If the next block of a waiting request is expected, the
waiting request is not admitted yet: the running request computes the block, and no tokens are computed twice. The wait
costs no time while the running request makes progress, because the running request comes first in every step anyway. A
request waits for at most the time that computing the rest of its own prompt would take. That time begins anew when
another of its blocks is there. While it waits, its sequences count as if they ran, up to half of all, so that those
behind it take no place from it.
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

        Of those whose time is over one gives up in a step: it computes the prefix too, and the others wait for either.
        A look takes a few microseconds: blocks that were found in the last one are not looked for again.
        """
        leader, wait = group.live[0], group.prefix_waits.get(self._worker)
        first = self._blocks.first_awaited(leader, 0 if wait is None else wait.first)
        if first is None:
            return False
        if wait is None or first != wait.first:  # it gets on, or what was found is gone
            num_missing = leader.num_tokens - first * self._blocks.block_size
            seconds = self._balancer.times.seconds(num_missing) * 1000 / self._member.speed
            wait = group.prefix_waits[self._worker] = PrefixWait(first, step.now + seconds)
        if step.now <= wait.until or step.has_given_up:
            return True
        step.has_given_up = True
        return False
