"""Values that transformers' classes take and no network can have are refused by their key, before a class is built."""

from math import inf, nan
from typing import Any

import pytest

from worker_service.models.registry import read_config

SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
DEEP: dict[str, list[str]] = {
    "gpt2": ["n_layer", "num_hidden_layers", "num_labels"],
    "opt": ["num_hidden_layers", "num_attention_heads"],
    "gpt_neox": ["num_hidden_layers"],
    "cohere2": ["num_hidden_layers"],
    "olmo3": ["num_hidden_layers"],
    "qwen2_moe": ["num_experts", "num_hidden_layers"],
    "glm4_moe": ["n_routed_experts"],
    "mamba": ["num_hidden_layers"],
    "bert": ["num_hidden_layers", "num_labels"],
    "t5": ["num_layers", "num_decoder_layers", "num_heads"],
    "bart": ["encoder_layers", "decoder_layers", "decoder_attention_heads"],
    "whisper": ["encoder_layers", "decoder_layers"],
}
COUNTS = [(family, key) for family, keys in DEEP.items() for key in keys]


@pytest.mark.parametrize(("family", "key"), COUNTS)
@pytest.mark.parametrize("number", [10**12, 1e12])
def test_a_network_of_endlessly_many_parts_is_refused_before_it_is_built(family: str, key: str, number: float) -> None:
    with pytest.raises(ValueError, match=rf"{key} is 1000000000000(\.0)?; it must be"):
        read_config({"vocab_size": 99, "model_type": family, key: number})


def test_a_part_of_another_network_is_not_built_either() -> None:
    with pytest.raises(ValueError, match=r"text_config\.num_hidden_layers is 1000000000; it must be"):
        read_config({"model_type": "aya_vision", "text_config": {"num_hidden_layers": 10**9}})


def test_layers_and_heads_are_bounded_together() -> None:
    """StableLM's code took 165 s for 512 layers of 1,024 heads."""
    sizes = {"hidden_size": 8192, "num_hidden_layers": 400, "num_attention_heads": 1024, "num_key_value_heads": 1024}
    with pytest.raises(ValueError, match="400 layers of 1024 heads are too many"):
        read_config(SMALL | sizes | {"model_type": "stablelm", "qk_layernorm": True})


IMPOSSIBLE: list[tuple[str, str, Any]] = [
    *(("granite", "rms_norm_eps", value) for value in (nan, inf, -1e-5, "1e-5", True, None)),
    *(("granite", "attention_bias", value) for value in ("false", 0, 1, "yes", [True])),
    *(("granite", "attention_multiplier", value) for value in (nan, -1.0, "0.5")),
    *(("granite", "vocab_size", value) for value in (0, -1, 1.5, True, "99", [99])),
    *(("granite", "hidden_size", value) for value in (0, -64, 64.0)),
    *(("granite", "max_position_embeddings", value) for value in (0, -1, 1e3)),
    *(("granite", "is_encoder_decoder", value) for value in ("false", 0)),
    *(("granite", "logits_scaling", value) for value in (0, 0.0, -inf)),
    *(("granite", "rope_theta", value) for value in (0, -1.0, nan, "10000", True)),
    *(("stablelm", "partial_rotary_factor", value) for value in (nan, 0, "0.25")),
    *(("starcoder2", "sliding_window", value) for value in (0, -1, "8", True)),
    *(("olmo3", "sliding_window", value) for value in (0, -1, 8.5)),
    *(("bert", "layer_norm_eps", value) for value in (nan, -1.0)),
    *(("bert", "is_encoder_decoder", value) for value in ("false", 1, True)),
    ("t5", "is_encoder_decoder", False),
    *(("bert", "type_vocab_size", value) for value in (0, -1)),
    *(("t5", "layer_norm_epsilon", value) for value in (nan, -1.0)),
    *(("whisper", "encoder_ffn_dim", value) for value in (-1, "64")),
]


@pytest.mark.parametrize(("family", "key", "value"), IMPOSSIBLE, ids=str)
def test_a_value_that_no_network_has_is_refused_by_its_key(family: str, key: str, value: Any) -> None:
    sizes = SMALL if family in ("granite", "stablelm", "starcoder2", "olmo3") else {"vocab_size": 99}
    with pytest.raises(ValueError, match=key):
        read_config(sizes | {"model_type": family, key: value})


_OF_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32}
UNLIMITED: list[dict[str, Any]] = [
    SMALL | _OF_MAMBA | {"model_type": "bamba", "attn_layer_indices": [1]},
    SMALL | _OF_MAMBA | {"model_type": "falcon_h1", "mamba_d_ssm": 128},
    {"model_type": "mamba2", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8,
     "head_dim": 16},
]  # fmt: skip


@pytest.mark.parametrize("json", UNLIMITED, ids=lambda json: json["model_type"])
def test_published_files_may_say_that_time_steps_have_no_limit(json: dict[str, Any]) -> None:
    """In JSON `Infinity`, in place of which transformers 5 writes an object."""
    for most in (inf, {"__float__": "Infinity"}):
        config: Any = read_config(json | {"time_step_limit": [0.0, most]})
        assert [*config.network.time_step_limit] == [0.0, inf]
    for limits in ([0.0, -inf], [0.0, nan]):
        with pytest.raises(ValueError, match=r"time_step_limit is .*; it must be a finite number"):
            read_config(json | {"time_step_limit": limits})


SCALED = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("key", [key for key in SCALED if key != "rope_type"])
@pytest.mark.parametrize("value", [nan, inf, 0, -1.0, "4.0", True, [1.0], {"a": 1}], ids=str)
def test_a_number_of_scaled_positions_is_one(key: str, value: Any) -> None:
    """transformers logs a warning of some of these."""
    read_config(SMALL | {"model_type": "olmo2", "rope_scaling": dict(SCALED)})
    with pytest.raises(ValueError, match=key):
        read_config(SMALL | {"model_type": "olmo2", "rope_scaling": SCALED | {key: value}})


ALIASES = [
    ("gpt2", "n_layer", "num_hidden_layers", 1, 2),
    ("gpt2", "n_embd", "hidden_size", 48, 96),
    ("gpt2", "n_positions", "max_position_embeddings", 64, 128),
    ("t5", "num_heads", "num_attention_heads", 4, 8),
    ("bart", "encoder_layers", "num_hidden_layers", 1, 2),
    ("bart", "d_model", "hidden_size", 64, 128),
    ("whisper", "encoder_layers", "num_hidden_layers", 1, 2),
]


@pytest.mark.parametrize(("family", "name", "alias", "value", "other"), ALIASES)
def test_two_names_of_one_value_say_the_same(family: str, name: str, alias: str, value: int, other: int) -> None:
    """transformers would take the one that it happens to set last."""
    sizes = (
        {"vocab_size": 99, "model_type": family, "n_head": 4, "n_layer": 1}
        if family == "gpt2"
        else {"model_type": family}
    )
    config = read_config(sizes | {name: value, alias: value})
    assert getattr(config.network, name) == value  # type: ignore[union-attr]
    assert getattr(read_config(sizes | {name: value, alias: None}).network, name) == value  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=rf"{alias} is {other}.*{name}.*{value}|{name} is {value}.*{alias} {other}"):
        read_config(sizes | {name: value, alias: other})
