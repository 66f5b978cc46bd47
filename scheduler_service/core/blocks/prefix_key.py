"""Keys of blocks in the prefix cache: a SHA-256 chain, so that a key stands for all tokens up to its block's end.

The root of a chain contains everything that must separate caches: the server's secret, the tenant's salt, the adapter.
If two different texts had the same key, a client could receive another client's text. With a guessable key, a client
could find out which prompts other clients have sent. A cryptographic hash prevents collisions and guessable keys.
Hashing a block takes about 1 µs. Each key is computed once and stored in its sequence.
"""

import hashlib
from array import array
from collections.abc import Iterator

from scheduler_service.core.blocks.sizes import TableSizes
from scheduler_service.core.groups.encoder_input import EncoderInput
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup


def root_key(*parts: bytes) -> bytes:
    """The root of a chain. Only equal parts give equal roots."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def root_behind(root: bytes, encoder_input: EncoderInput | None) -> bytes:
    """The root of the keys of a decoder's blocks. The root depends on the input of the encoder, as keys and values
    do."""
    return root if encoder_input is None else root_key(root, encoder_input.digest)


def encoder_keys(first: bytes, num_blocks: int) -> list[bytes]:
    """The keys of an encoder's blocks. Each key stands for the whole input of the encoder, so the last block need not
    be full."""
    return [root_key(first, index.to_bytes(8, "little"), b"encoder") for index in range(num_blocks)]


def first_key(group: SequenceGroup) -> bytes:
    """The start of the chain of a group's keys. Keys and values depend on the adapter and on the encoder's input."""
    return key_of_adapter(root_behind(group.cache_root, group.encoder_input), group.adapter_id)


def key_of_adapter(root: bytes, adapter: str) -> bytes:
    """The start of the chain for an adapter. Without an adapter, the chain starts with `root`."""
    return root_key(root, adapter.encode()) if adapter else root


def block_keys(first: bytes, token_ids: "array[int]", block_size: int) -> Iterator[bytes]:
    """The keys of the full blocks of these tokens."""
    key = first
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = next_key(key, token_ids[end - block_size : end])
        yield key


def next_key(previous: bytes, token_ids: "array[int]") -> bytes:
    """The key of the block that contains these tokens and follows the block with the key `previous`."""
    return hashlib.sha256(previous + token_ids.tobytes()).digest()


class SequenceKeys:
    """Computes the block keys of one worker's sequences. Without prefix caching no block is found, and there are no
    keys."""

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
        hidden states of all tokens.
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
