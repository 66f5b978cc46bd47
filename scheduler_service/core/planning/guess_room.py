"""Hands out what is left of a step as room for guesses, when all else has been planned.

So no token, no prompt and no block waits for a guess: what a step has room for may turn out to be used by none.
"""

from scheduler_service.core.groups.sequence import Sequence
from scheduler_service.core.planning.session import Session
from scheduler_service.core.planning.step import Step


class GuessRoom:
    """Of one worker's steps: tokens in equal shares, and blocks that are free above the watermark."""

    def __init__(self, session: Session) -> None:
        self._blocks = session.blocks
        self._max_num_batched_tokens = session.config.max_num_batched_tokens

    def hand_out(self, step: Step) -> None:
        """Note in `step.rooms` how many guesses each decoding sequence has room for that its worker wants to guess."""
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
        guesses is known. With those in flight no more than a chunk of a prompt could be, for which there are blocks,
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
