"""Reads the config.json of native families as a `DecoderConfig`, with transformers' defaults. Functions raise
ValueError for unsupported settings. Unread keys are refused (see `config_keys`)."""

from collections.abc import Callable, Mapping
from typing import Any

from kernels.ops import ClampedSwiglu
from worker_service.models.config.config_keys import check_all_read, check_generates
from worker_service.models.config.config_limits import MAX_LAYERS
from worker_service.models.config.rope import Rope, read_axial_rope, read_rope, read_theta, rope_of
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture, MixtureNames
from worker_service.models.decoders.deepseek import read_deepseek_v2, read_deepseek_v3, read_glm4_moe_lite
from worker_service.models.decoders.family_keys import (
    ACTIVATIONS,
    head_dim_of,
    num_layers_of,
    read_layers,
    read_qwen_windows,
    read_size,
    read_window,
    read_windows,
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


def _mixtral(json: ReadKeys) -> DecoderConfig:
    """Mistral with a mixture of experts in every layer. (Jiang et al., 2024.)"""
    num_layers = num_layers_of(json)
    mixture = Mixture(
        num_experts=_num_experts(json, 8),
        num_chosen=read_size(json, "num_experts_per_tok", 2),
        intermediate_size=read_size(json, "intermediate_size"),
        renormalise=True,
        names=MixtureNames("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
    )
    return read_layers(
        json,
        num_kv_heads=8,
        eps=1e-5,
        ropes=[read_rope(json, head_dim_of(json), 1_000_000.0)] * num_layers,
        windows=[json.integer("sliding_window", None, null=None)] * num_layers,
        mixtures=[mixture] * num_layers,
    )


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
        qk_norm=True,
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
        qk_norm=True,
        num_kv_heads=32,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        head_dim=128,
        ropes=[rope] * num_layers_of(json),
    )


def _qwen3_moe(json: ReadKeys) -> DecoderConfig:
    """Qwen3 with experts in all or most layers, and an optional window in all. (Yang et al., 2025.)"""
    json.neutral(use_qk_norm=True)
    num_layers, interval = num_layers_of(json), json.integer("decoder_sparse_step", 1)
    mixture = Mixture(
        num_experts=_num_experts(json, 128),
        num_chosen=read_size(json, "num_experts_per_tok", 8),
        intermediate_size=read_size(json, "moe_intermediate_size", 768),
        renormalise=json.boolean("norm_topk_prob", False),
        names=MixtureNames("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"),
    )
    dense = json.integers("mlp_only_layers", least=0, most=MAX_LAYERS) or ()
    has_experts = [number not in dense and (number + 1) % interval == 0 for number in range(num_layers)]
    window = read_window(json, 4096)
    if window is None:
        json.without_effect("max_window_layers")
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        qk_norm=True,
        num_kv_heads=4,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        windows=[window] * num_layers,
        mixtures=[mixture if has else None for has in has_experts],
    )


def _smollm3(json: ReadKeys) -> DecoderConfig:
    """Llama, with no rotary embeddings in every fourth layer. (Bakouch et al., 2025.)"""
    num_layers = num_layers_of(json)
    interval = json.integer("no_rope_layer_interval", 4)
    rotated = json.integers("no_rope_layers", num_layers, least=0, most=1)
    if rotated is None:
        rotated = [int((number + 1) % interval != 0) for number in range(num_layers)]
    rope = read_rope(json, head_dim_of(json), 2_000_000.0)
    window = read_window(json, None)
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        num_kv_heads=4,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=json.boolean("mlp_bias", False),
        tied_embeddings=True,
        ropes=[rope if rotates else None for rotates in rotated],
        windows=read_windows(json, window, [not rotates for rotates in rotated]),
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


def _gemma(json: ReadKeys) -> DecoderConfig:
    """Llama with scaled embeddings, larger heads, and norm weights stored minus 1. (Gemma Team, 2024.)"""
    return _read_gemma(json, "hidden_act", num_kv_heads=16)


def _gemma2(json: ReadKeys) -> DecoderConfig:
    """Gemma with post-norms, soft caps, and a window in every second layer. (Gemma Team, 2024.)"""
    slides = [number % 2 == 0 for number in range(num_layers_of(json))]
    window = json.integer("sliding_window", 4096, null=None)
    json.neutral(sliding_window_size=window)  # Gemma 2's first files have both keys
    return _read_gemma(
        json,
        num_kv_heads=4,
        post_norms=True,
        attention_scale=json.integer("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=json.number("attn_logit_softcapping", 50.0, null=None),
        logit_soft_cap=json.number("final_logit_softcapping", 30.0, null=None),
        windows=read_windows(json, window, slides),
    )


def _gemma3(json: ReadKeys) -> DecoderConfig:
    """Gemma 2 with normalised queries and keys in place of soft caps, and a smaller `rope_theta` in layers with a
    window. (Gemma Team, 2025.)"""
    num_layers, pattern = num_layers_of(json), json.integer("sliding_window_pattern", 6)
    window = json.integer("sliding_window", 4096, null=None)
    windows = read_windows(json, window, [(number + 1) % pattern != 0 for number in range(num_layers)])
    near = _gemma3_rope(json, "sliding_attention", "rope_local_base_freq", 10_000.0)
    far = _gemma3_rope(json, "full_attention", "rope_theta", 1_000_000.0)
    return _read_gemma(
        json,
        num_kv_heads=4,
        qk_norm=True,
        post_norms=True,
        attention_scale=json.integer("query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=json.number("final_logit_softcapping", None, null=None),
        windows=windows,
        ropes=[far if of_layer is None else near for of_layer in windows],
    )


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _gpt_oss(json: ReadKeys) -> DecoderConfig:
    """Attention with sinks, and a window in every second layer; experts with biases and a clamped activation. (OpenAI,
    2025.)"""
    num_layers, num_chosen = num_layers_of(json), read_size(json, "num_experts_per_tok", 4)
    rope = read_rope(json, head_dim_of(json, 64), 150_000.0, default=_GPT_OSS_ROPE)
    scaling = json.plain.get("rope_parameters") or json.plain.get("rope_scaling") or _GPT_OSS_ROPE
    # Repeated in OpenAI's files.
    json.neutral(experts_per_token=num_chosen, initial_context_length=scaling.get("original_max_position_embeddings"))
    json.neutral(hidden_act="silu")
    mixture = Mixture(
        num_experts=_num_experts(json, 128),
        num_chosen=num_chosen,
        intermediate_size=read_size(json, "intermediate_size"),
        renormalise=True,
        names=MixtureNames("mlp.router", "mlp.experts", gate="gate_up_proj", up=None, down="down_proj"),
        biased=True,
        activation=ClampedSwiglu(float(json.number("swiglu_alpha", 1.702)), float(json.number("swiglu_limit", 7.0))),
    )
    attention_bias = json.boolean("attention_bias", True)
    return read_layers(
        json,
        num_kv_heads=8,
        head_dim=64,
        eps=1e-5,
        activation="silu",
        sinks=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        ropes=[rope] * num_layers,
        windows=read_windows(json, json.integer("sliding_window", 128), [n % 2 == 0 for n in range(num_layers)]),
        mixtures=[mixture] * num_layers,
    )


FAMILIES: dict[str, Callable[[ReadKeys], DecoderConfig]] = FAMILIES_WITH_STATES | {
    "deepseek_v2": read_deepseek_v2,
    "deepseek_v3": read_deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4_moe_lite": read_glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "kimi_k2": read_deepseek_v3,
    "llama": _llama,
    "mimo": _mimo,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_5_vl_text": _qwen2_vl,
    "qwen2_vl_text": _qwen2_vl,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_text": _qwen3_vl,
    "smollm3": _smollm3,
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


def _read_gemma(json: ReadKeys, act_name: str = "hidden_activation", **options: Any) -> DecoderConfig:
    """Read the keys of all Gemmas. act_name: key of the activation; "hidden_act" and "hidden_activation" must not
    differ."""
    if json.boolean("use_bidirectional_attention", False, null=False):
        raise ValueError("use_bidirectional_attention is True, and attention to later tokens is not supported")
    activation = json.choice(act_name, ACTIVATIONS, "gelu_pytorch_tanh", null="gelu_pytorch_tanh")
    if act_name == "hidden_act" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # Gemma's first files mean the tanh variant
    json.neutral(hidden_act=activation, hidden_activation=activation)
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        head_dim=256,
        tied_embeddings=True,
        activation=activation,
        norm_offset=1.0,
        embedding_scale=float(read_size(json, "hidden_size")) ** 0.5,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        **options,
    )


def _gemma3_rope(json: ReadKeys, kind: str, theta_name: str, theta: float) -> Rope:
    """Older files scale only layers with full attention."""
    older = json.group("rope_scaling") if kind == "full_attention" else ReadKeys({})
    newer = json.group("rope_parameters").group(kind)
    if older.plain and newer.plain:
        raise ValueError("rope_parameters and rope_scaling are both there")
    parameters = newer if newer.plain else older
    theta = read_theta(parameters, json, theta_name, theta)
    return rope_of(parameters, json, head_dim_of(json, 256), theta, is_scaled_length=True)


def _num_experts(json: ReadKeys, default: int) -> int:
    names = ("num_experts", "num_local_experts")
    numbers = {read_size(json, name) for name in names if name in json}
    if len(numbers) > 1:
        raise ValueError("num_experts and num_local_experts say different numbers")
    return min(numbers, default=default)
