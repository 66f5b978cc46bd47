"""How many blocks sequences need: arithmetic on numbers of tokens, which looks at no block."""

from dataclasses import dataclass

from scheduler_service.core.groups.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The sizes of one worker's block tables; `num_blocks` are those of its whole pool, without which nothing is kept.

    A table has room for `num_lookahead_slots` tokens past those that its sequence computes next. With a
    `sliding_window` a sequence lets go of blocks in time and holds at most `max_blocks_per_sequence`.
    """

    block_size: int
    num_blocks: int
    num_lookahead_slots: int
    sliding_window: int
    max_blocks_per_sequence: int
    max_sequence_tokens: int

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) if self.num_blocks else 0

    def blocks_ahead(self, num_tokens: int) -> int:
        """Entries of a table with room for so many tokens and what may follow them."""
        return self.blocks_of(num_tokens + self.num_lookahead_slots)

    def slots(self, num_blocks: int) -> int:
        """Tokens that a table of so many entries has room for."""
        return num_blocks * self.block_size - self.num_lookahead_slots

    def first_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence without any is given: for all its tokens, or the most that it ever holds."""
        return self._within_window(self.blocks_ahead(sequence.num_tokens))

    def blocks_of_group(self, group: SequenceGroup) -> int:
        """Blocks that the group needs to reach the state it is in, those of the prompt shared if only read."""
        leader, *followers = group.live
        lengths = [follower.num_tokens for follower in followers]
        needed = self.first_blocks(leader) + sum(self._own_blocks(group, length, length) for length in lengths)
        return needed + self.blocks_of(group.num_encoder_tokens)

    def never_fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group outgrows the whole pool, at the latest with its longest outputs."""
        if not self.num_blocks:
            return len(group.prompt_token_ids) > self.max_sequence_tokens
        most = group.max_num_tokens(self.max_sequence_tokens) - 1  # the last token is never computed
        num_prompt = len(group.prompt_token_ids)
        leader, *followers = [sequence.num_tokens for sequence in group.live]
        followers += [num_prompt + 1] * (group.num_seqs - 1 - len(followers))  # beams to come
        shared = num_prompt // self.block_size
        needed = self._within_window(shared)
        needed += self._within_window(self.blocks_ahead(max(leader, most)) - shared)
        needed += sum(self._own_blocks(group, length, max(length, most)) for length in followers)
        needed = self._within_window(needed, 1 + len(followers))
        return needed + self.blocks_of(group.num_encoder_tokens) > self.num_blocks

    def _own_blocks(self, group: SequenceGroup, num_forked_with: int, num_tokens: int) -> int:
        """Blocks that a follower, which forks with so many tokens, shares with none when it has `num_tokens`.

        Without an output it computes the last prompt token itself: so a block that ends with the prompt is not shared.
        """
        shared = min(len(group.prompt_token_ids), num_forked_with - 1) // self.block_size
        return self._within_window(self.blocks_ahead(num_tokens) - shared)

    def _within_window(self, num_blocks: int, num_sequences: int = 1) -> int:
        """The blocks, of so many, that sequences hold at a time: with a sliding window each lets go of some in time."""
        return min(num_blocks, num_sequences * self.max_blocks_per_sequence) if self.sliding_window else num_blocks
