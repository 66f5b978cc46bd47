"""Limits for the sizes of a network in config.json."""

from collections.abc import Mapping
from typing import Any

from worker_service.read_keys import LARGEST

MAX_LAYERS = 512
"""transformers' code runs a network once without data before weights are read, at 15 ms per layer."""
MAX_EXPERTS = 2**12
SIZES: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, LARGEST),
    "hidden_size": (1, 2**20),
    "intermediate_size": (0, 2**24),
    "intermediate_size_mlp": (1, 2**24),
    "moe_intermediate_size": (0, 2**24),
    "block_ff_dim": (0, 2**24),
    "moe_latent_size": (1, 2**20),
    "moe_shared_expert_intermediate_size": (1, 2**24),
    "shared_intermediate_size": (1, 2**24),
    "shared_expert_intermediate_size": (1, 2**24),
    "num_experts": (0, MAX_EXPERTS),
    "num_local_experts": (0, MAX_EXPERTS),
    "n_routed_experts": (1, MAX_EXPERTS),
    "n_shared_experts": (1, MAX_EXPERTS),
    "n_group": (1, MAX_EXPERTS),
    "topk_group": (1, MAX_EXPERTS),
    "num_experts_per_tok": (0, MAX_EXPERTS),
    "num_hidden_layers": (1, MAX_LAYERS),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (1, 2**16),
    "q_lora_rank": (1, 2**16),
    "kv_lora_rank": (1, 2**16),
    "qk_nope_head_dim": (1, 2**16),
    "qk_rope_head_dim": (1, 2**16),
    "v_head_dim": (1, 2**16),
    "max_position_embeddings": (1, LARGEST),
}
"""Limits of a native network's sizes, beyond all existing networks. Such networks still fit on the meta device."""


def check_padding(network: Any) -> None:
    """Raise ValueError if the padding token is outside the vocabulary. network: a configuration object of
    transformers."""
    token, number = network.pad_token_id, network.vocab_size
    if token is not None and not -number <= token < number:
        raise ValueError(f"pad_token_id is {token}, and vocab_size is {number}; it must be below that")
