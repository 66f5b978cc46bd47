"""Limits for the sizes of a native network."""

from collections.abc import Mapping
from typing import Any

from worker_service.read_keys import LARGEST

MAX_LAYERS = 512
"""Layers. transformers' code takes 15 ms a layer to run a network once without its data."""
MAX_EXPERTS = 2**12
SIZES: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, LARGEST),
    "hidden_size": (1, 2**20),
    "intermediate_size": (0, 2**24),
    "moe_intermediate_size": (0, 2**24),
    "num_experts": (0, MAX_EXPERTS),
    "num_local_experts": (0, MAX_EXPERTS),
    "num_experts_per_tok": (0, MAX_EXPERTS),
    "num_hidden_layers": (1, MAX_LAYERS),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (1, 2**16),
    "max_position_embeddings": (1, LARGEST),
}
"""Minimum and maximum. The maximum exceeds any existing network, yet a model of this size can be described without its
memory."""


def check_padding(network: Any) -> None:
    """Raise ValueError if the padding token has no embedding. network: a configuration of transformers."""
    token, number = network.pad_token_id, network.vocab_size
    if token is not None and not -number <= token < number:
        raise ValueError(f"pad_token_id is {token}, and vocab_size is {number}; it must be below that")
