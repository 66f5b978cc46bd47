"""Families in transformers' code: a key is known if their classes or their code read it, and obeyed, or is refused."""

from typing import Any

import pytest
from transformers import PreTrainedConfig

from worker_service.models.config.config_keys import HARMLESS
from worker_service.models.registry import read_config

SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FIELDS = {"architectures", "is_encoder_decoder", "model_type", "per_layer_config"}
OF_CLASSES = {name for name in dir(PreTrainedConfig) if not name.startswith("_")} - HARMLESS - FIELDS - {"rope_scaling"}
KEYS_OF_PLANS = {"layers", "norm", "embed_tokens", "hidden_states", "input_ids"}


@pytest.mark.parametrize("name", sorted(OF_CLASSES | KEYS_OF_PLANS))
def test_what_a_class_has_besides_its_fields_is_no_key(name: str) -> None:
    """Methods among them, such as "update": transformers would put the file's value in their place."""
    with pytest.raises(ValueError, match=rf"it says {name} = 1, which is not supported in a model granite"):
        read_config(SMALL | {"model_type": "granite", name: 1})


REPEATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an activation": ({"model_type": "starcoder2"}, {"activation_function": "relu"}),
    "a norm": ({"model_type": "starcoder2", "norm_epsilon": 1e-5}, {"layer_norm_epsilon": 1e-6}),
    "a norm of StableLM": ({"model_type": "stablelm", "layer_norm_eps": 1e-5}, {"norm_eps": 1e-6}),
    "a part of heads": ({"model_type": "stablelm", "partial_rotary_factor": 0.25}, {"rope_pct": 0.5}),
    "a part of heads of GPT-NeoX": ({"model_type": "gpt_neox", "rotary_pct": 0.25}, {"partial_rotary_factor": 0.5}),
    "scaled positions": ({"model_type": "stablelm"}, {"rotary_scaling_factor": 2.0}),
    "a base": ({"model_type": "olmo2", "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
               {"rope_theta": 6.0}),
    "kinds of layers": ({"model_type": "cohere2"}, {"layer_switch": 2}),
    "kinds of layers, twice": (
        {"model_type": "cohere2", "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"sliding_window_pattern": 2},
    ),
    "kinds of layers, in private": ({"model_type": "cohere2"}, {"_sliding_window_pattern": 2}),
    "which layers come first": ({"model_type": "cohere2"}, {"order_of_interleaved_layers": "global_attn_first"}),
    "a head of its own": ({"model_type": "cohere2", "tie_word_embeddings": True}, {"use_embedding_sharing": False}),
    "how heads turn": ({"model_type": "cohere2"}, {"position_embedding_type": "rope_neox"}),
    "a part of heads of Cohere": ({"model_type": "cohere2"}, {"rotary_pct": 0.5}),
    "compressed positions": ({"model_type": "ernie4_5"}, {"compression_ratio": 2.0}),
    "special tokens": ({"model_type": "gpt2"}, {"n_special": 3}),
    "a size of Falcon": ({"model_type": "falcon", "num_hidden_layers": 2}, {"ff_factor": 2}),
    "a part of heads of Nemotron": ({"model_type": "nemotron", "partial_rotary_factor": 0.5}, {"rope_percent": 0.25}),
    "a head's size": ({"model_type": "nemotron", "head_dim": 16}, {"kv_channels": 8}),
    "a part of heads of Phi": ({"model_type": "phi", "partial_rotary_factor": 0.5}, {"rotary_dim": 4}),
    "groups of heads": ({"model_type": "persimmon", "num_key_value_heads": 4}, {"num_key_value_heads": 2}),
    "experts that overflow": (
        {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2}, {"moe_capacity": [4, 4, 2]}
    ),
    "keys of other layers": (
        {"model_type": "hunyuan_v1_dense", "head_dim": 16, "cla_share_factor": 2}, {"use_cla": True}
    ),
    "heads without norms": ({"model_type": "hunyuan_v1_dense", "head_dim": 16}, {"use_qk_norm": False}),
    "weights of experts": ({"model_type": "afmoe"}, {"route_norm": False}),
    "another norm": ({"model_type": "starcoder2"}, {"norm_type": "rms_norm"}),
    "a window": ({"model_type": "starcoder2", "sliding_window": 8}, {"use_sliding_window": False}),
    "two scalings": (
        {"model_type": "olmo2", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_a_key_that_repeats_another_must_agree_with_it(name: str) -> None:
    """transformers reads one of the two and keeps the other."""
    plain, more = REPEATED[name]
    sizes = {"vocab_size": 99} if plain["model_type"] in ("falcon", "gpt2", "gpt_neox") else SMALL
    read_config(sizes | plain)
    with pytest.raises(ValueError, match="|".join(more)):
        read_config(sizes | plain | more)


@pytest.mark.parametrize("more", [{"factor": 2.0}, {"mscale": 0.7}, {"rope_type": "linear"}, {"beta_fast": 16}])
def test_hunyuans_alpha_is_the_only_factor_of_its_positions(more: dict[str, Any]) -> None:
    """transformers' code ignores the others if there is one, and the alpha of another type."""
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "beta_fast": 32, "mscale": 1.0}
    plain = SMALL | {"model_type": "hunyuan_v1_dense", "head_dim": 16}
    read_config(plain | {"rope_scaling": rope})
    with pytest.raises(ValueError, match="|".join(more)):
        read_config(plain | {"rope_scaling": rope | more})
