"""Keys of blocks: SHA-256 chains over the block's tokens and all tokens before them.

The chain's root separates caches: it holds the server's secret, the tenant's salt and the adapter. With a collision or
a guessable key, a client could read another client's text. Hashing a block takes about 1 µs.
"""

import hashlib
from array import array
from collections.abc import Iterator

from scheduler_service.core.groups.encoder_input import EncoderInput
from scheduler_service.core.groups.prompt_item import Items, key_of_items
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup


def root_key(*parts: bytes) -> bytes:
    """The root of a chain. Only equal parts give equal roots."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def root_behind(root: bytes, encoder_input: EncoderInput | None) -> bytes:
    return root if encoder_input is None else root_key(root, encoder_input.digest)


def encoder_keys(first: bytes, num_blocks: int) -> list[bytes]:
    """Keys of an encoder's blocks; each stands for the whole input, so the last block need not be full."""
    return [root_key(first, index.to_bytes(8, "little"), b"encoder") for index in range(num_blocks)]


def first_key(group: SequenceGroup) -> bytes:
    return key_of_adapter(root_behind(group.cache_root, group.encoder_input), group.adapter_id)


def key_of_adapter(root: bytes, adapter: str) -> bytes:
    return root_key(root, adapter.encode()) if adapter else root


def block_keys(first: bytes, token_ids: "array[int]", block_size: int, items: Items = ()) -> Iterator[bytes]:
    """The keys of the full blocks of these tokens."""
    key = first
    for start in range(0, len(token_ids) + 1 - block_size, block_size):
        key = next_key(key, token_ids[start : start + block_size], items, start)
        yield key


def next_key(previous: bytes, token_ids: "array[int]", items: Items = (), start: int = 0) -> bytes:
    begun = key_of_items(items, start, start + len(token_ids)) if items else b""
    return hashlib.sha256(previous + token_ids.tobytes() + begun).digest()


class SequenceKeys:
    """Computes the block keys of one worker's sequences; without prefix caching there are none."""

    def __init__(self, block_size: int, *, prefix_caching: bool) -> None:
        self.block_size = block_size
        self._prefix_caching = prefix_caching

    def leading(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks, which must be full, and possibly of later blocks."""
        keys = sequence.block_keys
        if sequence.is_encoder and not keys:
            keys += encoder_keys(first_key(sequence.group), num_blocks)
        size = self.block_size
        for index in range(len(keys), num_blocks):
            tokens = sequence.tokens_between(index * size, (index + 1) * size)
            previous = keys[-1] if keys else first_key(sequence.group)
            keys.append(next_key(previous, tokens, sequence.group.items, index * size))
        return keys

    def cacheable(self, sequence: Sequence) -> list[bytes]:
        """The keys of all full blocks before the last token, which is computed for its logits. The list is empty if the
        hidden states of all tokens are needed."""
        num_blocks = self.num_cacheable(sequence)
        return self.leading(sequence, num_blocks)[:num_blocks]

    def caches(self, sequence: Sequence) -> bool:
        return self._prefix_caching and not sequence.sampling.needs_all_states

    def num_cacheable(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self.block_size if self.caches(sequence) else 0

    def cacheable_of_encoder(self, encoder: EncoderSequence) -> list[bytes]:
        return self.leading(encoder, -(-encoder.num_prompt_tokens // self.block_size)) if self._prefix_caching else []

    def findable(self, leader: Sequence) -> list[bytes]:
        encoder = leader.group.encoder
        own = self.cacheable(leader)
        return own if encoder is None else [*self.cacheable_of_encoder(encoder), *own]
