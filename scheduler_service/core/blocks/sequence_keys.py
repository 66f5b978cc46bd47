"""The keys that publish and find a sequence's blocks. Each key is computed once and stored in its sequence."""

from scheduler_service.core.blocks.prefix_key import encoder_keys, first_key, next_key
from scheduler_service.core.blocks.sizes import TableSizes
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence


class SequenceKeys:
    """The block keys of one worker. Without prefix caching no block is found, and there are no keys."""

    def __init__(self, sizes: TableSizes, *, prefix_caching: bool) -> None:
        self._sizes = sizes
        self._prefix_caching = prefix_caching

    def leading(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks, which must be full. The list may contain keys of later blocks
        too."""
        keys = sequence.block_keys
        if sequence.is_encoder and not keys:
            keys += encoder_keys(first_key(sequence.group), num_blocks)
        size = self._sizes.block_size
        for index in range(len(keys), num_blocks):
            tokens = sequence.tokens_between(index * size, (index + 1) * size)
            keys.append(next_key(keys[-1] if keys else first_key(sequence.group), tokens))
        return keys

    def cacheable(self, sequence: Sequence) -> list[bytes]:
        """The keys of blocks that a sequence could find in the cache: all full blocks before the last token.

        The last token must be computed for its logits. The list is empty if log-probabilities or vectors need the
        states of all tokens.
        """
        num_blocks = self.num_cacheable(sequence)
        return self.leading(sequence, num_blocks)[:num_blocks]

    def num_cacheable(self, sequence: Sequence) -> int:
        """The number of keys that `cacheable` returns."""
        if not self._prefix_caching or sequence.sampling.needs_all_states:
            return 0
        return (sequence.num_tokens - 1) // self._sizes.block_size

    def cacheable_of_encoder(self, encoder: EncoderSequence) -> list[bytes]:
        """The keys of all blocks of an encoder's input. The last block counts as full."""
        return self.leading(encoder, self._sizes.blocks_of(encoder.num_prompt_tokens)) if self._prefix_caching else []

    def findable(self, leader: Sequence) -> list[bytes]:
        """The keys of all blocks that a waiting group could find in the cache. The keys of its encoder's input come
        first."""
        encoder = leader.group.encoder
        own = self.cacheable(leader)
        return own if encoder is None else [*self.cacheable_of_encoder(encoder), *own]
