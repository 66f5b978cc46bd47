"""Reads the config.json of families with a mixture of experts in most layers, and no shared experts."""

from kernels.linear.experts import Routing
from kernels.ops import ClampedSwiglu
from worker_service.models.config.config_limits import MAX_LAYERS
from worker_service.models.config.rope import read_axial_rope, read_rope
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture, MixtureNames
from worker_service.models.decoders.readers.family_keys import (
    head_dim_of,
    num_experts_of,
    num_layers_of,
    read_layers,
    read_size,
    window_of,
    windows_of,
)
from worker_service.read_keys import ReadKeys

_MIXTRAL_NAMES = MixtureNames("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2")


def read_mixtral(json: ReadKeys) -> DecoderConfig:
    """Mistral with a mixture of experts in every layer. (Jiang et al., 2024.)"""
    num_layers = num_layers_of(json)
    mixture = Mixture(
        num_experts=num_experts_of(json, 8),
        num_chosen=read_size(json, "num_experts_per_tok", 2),
        intermediate_size=read_size(json, "intermediate_size"),
        renormalise=True,
        names=_MIXTRAL_NAMES,
    )
    return read_layers(
        json,
        num_kv_heads=8,
        eps=1e-5,
        ropes=[read_rope(json, head_dim_of(json), 1_000_000.0)] * num_layers,
        windows=[json.integer("sliding_window", None, null=None)] * num_layers,
        mixtures=[mixture] * num_layers,
    )


def read_minimax_m2(json: ReadKeys) -> DecoderConfig:
    """A token's experts have the largest sigmoid scores plus a trained bias. Queries and keys are normalised over all
    heads, and rotated in part. (MiniMax, 2025.)"""
    num_layers, head_dim = num_layers_of(json), head_dim_of(json, 128)
    json.neutral(
        attn_type_list=[1] * num_layers, layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0,
        layernorm_mlp_beta=1.0, qk_norm_type="per_layer", scoring_func="sigmoid", shared_intermediate_size=0,
        use_qk_norm=True, use_routing_bias=True,
    )  # fmt: skip
    # Of dense layers, shared experts and layers for multi-token prediction, which no published checkpoint has.
    json.without_effect(
        "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"
    )
    rotary_dim = json.integer("rotary_dim", head_dim, null=head_dim, most=head_dim)
    num_experts, num_chosen = num_experts_of(json, 256), read_size(json, "num_experts_per_tok", 8)
    mixture = Mixture(
        num_experts,
        num_chosen,
        intermediate_size=read_size(json, "intermediate_size", 1536),
        renormalise=True,
        names=_MIXTRAL_NAMES,
        routing=Routing(num_experts, num_chosen, is_sigmoid=True, renormalise=True, scale=1.0),
    )
    share = rotary_dim / head_dim
    return read_layers(
        json,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=mixture.intermediate_size,
        ropes=[read_rope(json, head_dim, 5_000_000.0, parts_of_heads=True, share=share)] * num_layers,
        mixtures=[mixture] * num_layers,
        qk_norm="all",
        renamed=(("block_sparse_moe.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),),
    )


def read_qwen3_moe(json: ReadKeys) -> DecoderConfig:
    """Qwen3 with experts in all or most layers, and an optional window in all. (Yang et al., 2025.)"""
    json.neutral(use_qk_norm=True)
    mixture = Mixture(
        num_experts=num_experts_of(json, 128),
        num_chosen=read_size(json, "num_experts_per_tok", 8),
        intermediate_size=read_size(json, "moe_intermediate_size", 768),
        renormalise=json.boolean("norm_topk_prob", False),
        names=MixtureNames("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"),
    )
    num_layers, window = num_layers_of(json), window_of(json, 4096)
    if window is None:
        json.without_effect("max_window_layers")
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        qk_norm="head",
        num_kv_heads=4,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        windows=[window] * num_layers,
        mixtures=_in_qwen_layers(json, mixture),
    )


def read_qwen3_vl_moe(json: ReadKeys) -> DecoderConfig:
    """Qwen3-MoE with positions in three axes, experts in stacks, and without windows. (Qwen Team, 2025.)"""
    json.neutral(norm_topk_prob=True)  # published, and always so
    mixture = Mixture(
        num_experts=num_experts_of(json, 60),
        num_chosen=read_size(json, "num_experts_per_tok", 4),
        intermediate_size=read_size(json, "moe_intermediate_size", 1408),
        renormalise=True,
        names=MixtureNames("mlp.gate", "mlp.experts", gate="gate_up_proj", up=None, down="down_proj"),
    )
    attention_bias = json.boolean("attention_bias", False)
    rope = read_axial_rope(json, head_dim_of(json), 500_000.0, sections=(24, 20, 20), is_interleaved=True)
    return read_layers(
        json,
        qk_norm="head",
        num_kv_heads=16,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        ropes=[rope] * num_layers_of(json),
        mixtures=_in_qwen_layers(json, mixture),
    )


def _in_qwen_layers(json: ReadKeys, mixture: Mixture) -> list[Mixture | None]:
    """The mixture of each layer, or None for a dense layer."""
    interval = json.integer("decoder_sparse_step", 1)
    dense = json.integers("mlp_only_layers", least=0, most=MAX_LAYERS) or ()
    has_experts = (number not in dense and (number + 1) % interval == 0 for number in range(num_layers_of(json)))
    return [mixture if has else None for has in has_experts]


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_gpt_oss(json: ReadKeys) -> DecoderConfig:
    """Attention with sinks, and a window in every second layer; experts with biases and a clamped activation. (OpenAI,
    2025.)"""
    num_layers, num_chosen = num_layers_of(json), read_size(json, "num_experts_per_tok", 4)
    rope = read_rope(json, head_dim_of(json, 64), 150_000.0, default=_GPT_OSS_ROPE)
    scaling = json.plain.get("rope_parameters") or json.plain.get("rope_scaling") or _GPT_OSS_ROPE
    # Repeated in OpenAI's files.
    json.neutral(experts_per_token=num_chosen, initial_context_length=scaling.get("original_max_position_embeddings"))
    json.neutral(hidden_act="silu")
    mixture = Mixture(
        num_experts=num_experts_of(json, 128),
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
        windows=windows_of(json, json.integer("sliding_window", 128), [n % 2 == 0 for n in range(num_layers)]),
        mixtures=[mixture] * num_layers,
    )
