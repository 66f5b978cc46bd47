"""Reads the config.json of native families as a `DecoderConfig`, with transformers' defaults. Functions raise
ValueError for unsupported settings. Unread keys are refused (see `config_keys`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from worker_service.models.config.config_keys import check_all_read, check_generates
from worker_service.models.config.rope import read_axial_rope, read_rope
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.readers.deepseek import (
    read_deepseek_v2,
    read_deepseek_v3,
    read_glm4_moe,
    read_glm4_moe_lite,
    read_minicpm3,
    read_mistral4,
    read_youtu,
)
from worker_service.models.decoders.readers.family_keys import (
    head_dim_of,
    mistral_rope,
    num_layers_of,
    read_layers,
    read_qwen_windows,
    read_temperature,
    rope_of_kind,
    rope_parameters,
    window_of,
    windows_of,
)
from worker_service.models.decoders.readers.gemma import read_gemma, read_gemma2, read_gemma3
from worker_service.models.decoders.readers.gemma4 import read_gemma4, read_gemma4_unified
from worker_service.models.decoders.readers.llama4 import read_llama4
from worker_service.models.decoders.readers.mixtures import (
    read_gpt_oss,
    read_minimax_m2,
    read_mixtral,
    read_qwen3_moe,
    read_qwen3_vl_moe,
)
from worker_service.models.decoders.states.families import FAMILIES_WITH_STATES
from worker_service.read_keys import ReadKeys


def _llama(json: ReadKeys) -> DecoderConfig:
    """Llama and SmolLM2. (Touvron et al., 2023.)"""
    if json.plain.get("hidden_act", "silu") == "silu":
        json.neutral(activation="swiglu")  # Falcon 3 has both keys
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(json, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=json.boolean("mlp_bias", False))


def _mistral(json: ReadKeys) -> DecoderConfig:
    """Llama with a window in every layer. (Jiang et al., 2023.)"""
    return read_layers(
        json, num_kv_heads=8, windows=[json.integer("sliding_window", 4096, null=None)] * num_layers_of(json)
    )


_MINISTRAL3_ROPE = mistral_rope(theta=1_000_000.0, factor=16.0, length=16_384)


def _ministral3(json: ReadKeys) -> DecoderConfig:
    """Mistral with queries that grow with their positions, as in Llama 4. (Mistral AI, 2025.)"""
    num_layers, head_dim = num_layers_of(json), None if json.plain.get("head_dim", 128) is None else 128
    rope = read_rope(json, head_dim_of(json, head_dim), default=_MINISTRAL3_ROPE)
    temperature = read_temperature(json, rope_parameters(json, _MINISTRAL3_ROPE))
    config = read_layers(
        json,
        num_kv_heads=8,
        head_dim=head_dim,
        eps=1e-5,
        ropes=[rope] * num_layers,
        windows=[json.integer("sliding_window", None, null=None)] * num_layers,
    )
    return replace(config, layers=tuple(replace(layer, temperature=temperature) for layer in config.layers))


def _qwen2(json: ReadKeys) -> DecoderConfig:
    """Llama with query, key and value biases, and optional windows in late layers. (Yang et al., 2024.)"""
    json.neutral(attention_bias=True)
    return read_layers(json, qkv_bias=True, num_kv_heads=32, windows=read_qwen_windows(json))


def _qwen2_vl(json: ReadKeys) -> DecoderConfig:
    """Qwen2 with positions in three axes. (Wang et al., 2024.)"""
    rope = read_axial_rope(json, head_dim_of(json), 1_000_000.0, sections=(16, 24, 24), is_interleaved=False)
    windows = read_qwen_windows(json, 80)
    return read_layers(json, qkv_bias=True, num_kv_heads=8, eps=1e-5, ropes=[rope] * len(windows), windows=windows)


def _mimo(json: ReadKeys) -> DecoderConfig:
    """Qwen2 with a layer for multi-token prediction, draft method "mtp". (Xiaomi LLM-Core Team, 2025.)"""
    json.without_effect("num_nextn_predict_layers")
    return _qwen2(json)


def _qwen3(json: ReadKeys) -> DecoderConfig:
    """Qwen2 with normalised queries and keys, without biases. (Yang et al., 2025.)"""
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        qk_norm="head",
        num_kv_heads=32,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        head_dim=128,
        windows=read_qwen_windows(json),
    )


def _qwen3_vl(json: ReadKeys) -> DecoderConfig:
    """Qwen3 with positions in three axes, and without windows. (Qwen Team, 2025.)"""
    attention_bias = json.boolean("attention_bias", False)
    rope = read_axial_rope(json, head_dim_of(json, 128), 500_000.0, sections=(24, 20, 20), is_interleaved=True)
    return read_layers(
        json,
        qk_norm="head",
        num_kv_heads=32,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        head_dim=128,
        ropes=[rope] * num_layers_of(json),
    )


def _smollm3(json: ReadKeys) -> DecoderConfig:
    """Llama, with no rotary embeddings in every fourth layer. (Bakouch et al., 2025.)"""
    num_layers = num_layers_of(json)
    interval = json.integer("no_rope_layer_interval", 4)
    rotated = json.integers("no_rope_layers", num_layers, least=0, most=1)
    if rotated is None:
        rotated = [int((number + 1) % interval != 0) for number in range(num_layers)]
    rope = read_rope(json, head_dim_of(json), 2_000_000.0)
    window = window_of(json, None)
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        num_kv_heads=4,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=json.boolean("mlp_bias", False),
        tied_embeddings=True,
        ropes=[rope if rotates else None for rotates in rotated],
        windows=windows_of(json, window, [not rotates for rotates in rotated]),
    )


def _phi3(json: ReadKeys) -> DecoderConfig:
    """Llama with fused projections; some models rotate a part of each head only. (Abdin et al., 2024.)"""
    num_layers = num_layers_of(json)
    rope = read_rope(json, head_dim_of(json), parts_of_heads=True, original=4096)
    return read_layers(
        json,
        fused_checkpoint=True,
        eps=1e-5,
        ropes=[rope] * num_layers,
        windows=[json.integer("sliding_window", None, null=None)] * num_layers,
    )


def _olmo3(json: ReadKeys) -> DecoderConfig:
    """Llama whose halves' outputs are normalised in place of their inputs, with windows in most layers. Queries and
    keys are normalised over all heads. (Team Olmo, 2025.)"""
    slides = [(number + 1) % 4 != 0 for number in range(num_layers_of(json))]
    windows = windows_of(json, json.integer("sliding_window", 4096), slides)
    theta, near = 500_000.0, json.group("rope_parameters").group("sliding_attention")
    if "rope_theta" not in near and json.plain.get("rope_theta", theta) != theta:
        raise ValueError(
            f"rope_theta is {json.plain['rope_theta']} for layers without a window only; rope_parameters must say it "
            "for each kind of layer"
        )
    ropes = {kind: rope_of_kind(json, kind, head_dim_of(json), theta) for kind in ("full", "sliding")}
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        eps=1e-5,
        ropes=[ropes["full" if window is None else "sliding"] for window in windows],
        windows=windows,
        qk_norm="all",
        pre_norms=False,
        post_norms=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
    )


FAMILIES: dict[str, Callable[[ReadKeys], DecoderConfig]] = FAMILIES_WITH_STATES | {
    "deepseek_v2": read_deepseek_v2,
    "deepseek_v3": read_deepseek_v3,
    "gemma": read_gemma,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3,
    "gemma4_text": read_gemma4,
    "gemma4_unified_text": read_gemma4_unified,
    "glm4_moe": read_glm4_moe,
    "glm4_moe_lite": read_glm4_moe_lite,
    "gpt_oss": read_gpt_oss,
    "kimi_k2": read_deepseek_v3,
    "llama": _llama,
    "llama4_text": read_llama4,
    "mimo": _mimo,
    "minicpm3": read_minicpm3,
    "minimax_m2": read_minimax_m2,
    "ministral3": _ministral3,
    "mistral": _mistral,
    "mistral4": read_mistral4,
    "mixtral": read_mixtral,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_5_vl_text": _qwen2_vl,
    "qwen2_vl_text": _qwen2_vl,
    "qwen3": _qwen3,
    "qwen3_moe": read_qwen3_moe,
    "qwen3_vl_moe_text": read_qwen3_vl_moe,
    "qwen3_vl_text": _qwen3_vl,
    "smollm3": _smollm3,
    "youtu": read_youtu,
}
"""Readers by `model_type`."""


def read_decoder(json: Mapping[str, Any]) -> DecoderConfig:
    """Raises a ValueError that names an unsupported key or value."""
    keys = ReadKeys(json)
    family = keys.choice("model_type", FAMILIES)
    check_generates(json, *_NETWORKS.get(family, ()))
    config = FAMILIES[family](keys)
    keys.without_effect("architectures")
    check_all_read(keys, family)
    return config


_NETWORKS = {"kimi_k2": ("DeepseekV3ForCausalLM",)}
"""Class names of families whose network is another family's."""

WITH_MTP = ("mimo",)
"""Families with a layer for multi-token prediction in the checkpoint (see `mtp`)."""
