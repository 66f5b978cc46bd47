"""Keys of blocks in the prefix cache: a SHA-256 chain, so that a key stands for all tokens up to its block's end.

The root of a chain is made of whatever must keep caches apart: the server's own secret, the tenant's salt, the adapter.
A collision would show one client another's text, and a guessable key would let one client find out what another has
asked; hence a cryptographic hash, at about 1 µs a block.
"""

import hashlib
from array import array
from collections.abc import Iterator

from scheduler_service.core.groups.encoder_input import EncoderInput
from scheduler_service.core.groups.sequence import SequenceGroup


def root_key(*parts: bytes) -> bytes:
    """The beginning of a chain that only equal parts share."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def root_behind(root: bytes, encoder_input: EncoderInput | None) -> bytes:
    """The root of a decoder's keys: what it makes of its tokens depends on what its encoder has read."""
    return root if encoder_input is None else root_key(root, encoder_input.digest)


def encoder_keys(first: bytes, num_blocks: int) -> list[bytes]:
    """The keys of an encoder's blocks, the last of which need not be full: each stands for the whole input."""
    return [root_key(first, index.to_bytes(8, "little"), b"encoder") for index in range(num_blocks)]


def first_key(group: SequenceGroup) -> bytes:
    """The beginning of the chain of a group's keys: keys and values differ from adapter to adapter, and with what an
    encoder has read."""
    return key_of_adapter(root_behind(group.cache_root, group.encoder_input), group.adapter_id)


def key_of_adapter(root: bytes, adapter: str) -> bytes:
    """The beginning of the chain for an adapter; the root itself without one."""
    return root_key(root, adapter.encode()) if adapter else root


def block_keys(first: bytes, token_ids: "array[int]", block_size: int) -> Iterator[bytes]:
    """The keys of the full blocks of these tokens."""
    key = first
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = next_key(key, token_ids[end - block_size : end])
        yield key


def next_key(previous: bytes, token_ids: "array[int]") -> bytes:
    """The key of the block with these tokens after the block of the previous key."""
    return hashlib.sha256(previous + token_ids.tobytes()).digest()
