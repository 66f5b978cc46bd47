"""Computes from numbers of tokens how many blocks sequences need, without looking at any block."""

from dataclasses import dataclass

from scheduler_service.core.groups.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The sizes of one worker's block tables.

    `num_blocks` is the number of blocks in the pool; if it is 0, no keys and values are stored. The block
    table of a sequence covers the tokens of the next step and `num_lookahead_slots` further tokens. With a
    `sliding_window`, a sequence frees blocks behind the window, and holds at most `max_blocks_per_sequence` blocks.
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
        """Number of entries of a table with room for `num_tokens` tokens and the lookahead slots."""
        return self.blocks_of(num_tokens + self.num_lookahead_slots)

    def slots(self, num_blocks: int) -> int:
        """Number of tokens that a table of `num_blocks` entries has room for."""
        return num_blocks * self.block_size - self.num_lookahead_slots

    def first_blocks(self, sequence: Sequence) -> int:
        """Number of blocks that a sequence without blocks receives: blocks for all its tokens, or at most the blocks of
        a sliding window."""
        return self._within_window(self.blocks_ahead(sequence.num_tokens))

    def blocks_of_group(self, group: SequenceGroup) -> int:
        """Number of blocks that the group needs for its present tokens. The group's sequences share the prompt's blocks
        that no sequence writes to."""
        leader, *followers = group.live
        lengths = [follower.num_tokens for follower in followers]
        needed = self.first_blocks(leader) + sum(self._own_blocks(group, length, length) for length in lengths)
        return needed + self.blocks_of(group.num_encoder_tokens)

    def never_fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group needs more than the whole pool when its outputs have their maximum length."""
        if not self.num_blocks:
            return len(group.prompt_token_ids) > self.max_sequence_tokens
        most = group.max_num_tokens(self.max_sequence_tokens) - 1  # the last token is never computed, only sampled
        num_prompt = len(group.prompt_token_ids)
        leader, *followers = [sequence.num_tokens for sequence in group.live]
        followers += [num_prompt + 1] * (group.num_seqs - 1 - len(followers))  # beams of later steps
        shared = num_prompt // self.block_size
        needed = self._within_window(shared)
        needed += self._within_window(self.blocks_ahead(max(leader, most)) - shared)
        needed += sum(self._own_blocks(group, length, max(length, most)) for length in followers)
        needed = self._within_window(needed, 1 + len(followers))
        return needed + self.blocks_of(group.num_encoder_tokens) > self.num_blocks

    def _own_blocks(self, group: SequenceGroup, num_forked_with: int, num_tokens: int) -> int:
        """Number of blocks that a follower shares with no other sequence when it has `num_tokens` tokens.

        `num_forked_with` is the follower's number of tokens when it forks. A follower without output computes the last
        prompt token itself, so a block that ends with the prompt is not shared.
        """
        shared = min(len(group.prompt_token_ids), num_forked_with - 1) // self.block_size
        return self._within_window(self.blocks_ahead(num_tokens) - shared)

    def _within_window(self, num_blocks: int, num_sequences: int = 1) -> int:
        """`num_blocks`; with a sliding window, at most the blocks that `num_sequences` sequences hold at a time."""
        return min(num_blocks, num_sequences * self.max_blocks_per_sequence) if self.sliding_window else num_blocks
