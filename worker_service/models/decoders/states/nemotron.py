"""Reads the config.json of Nemotron-H. (NVIDIA, 2025.)"""

from dataclasses import replace

from kernels.linear.experts import Routing
from worker_service.models.config.config_limits import MAX_LAYERS
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture, MixtureNames
from worker_service.models.decoders.readers.family_keys import check_step_limits, read_layers, read_size
from worker_service.models.layers.mixers import MAX_TAPS, Mamba2
from worker_service.read_keys import ReadKeys
from worker_service.wording import shown

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Kinds of layers by their letters in `hybrid_override_pattern`."""
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_HEAD_DIM = 128
"""The default, also of the first files' `attention_head_dim`."""
_OF_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
)  # fmt: skip
_NAMES = (
    *((ours, "mixer") for ours in ("mamba", "mlp", "self_attn")),
    *((ours, "norm") for ours in ("input_layernorm", "post_attention_layernorm")),
    ("model.embed_tokens", "model.embeddings"),
    ("model.norm", "model.norm_f"),
)


def read_nemotron_h(json: ReadKeys) -> DecoderConfig:
    """Each layer is one half: Mamba-2, attention without positions, a network without gates, or a mixture of experts
    beside a shared one."""
    kinds = _kinds(json)
    mixer = _mamba2(json)
    json.neutral(
        attention_head_dim=json.plain.get("head_dim", _HEAD_DIM), mamba_proj_bias=False,
        mamba_ssm_cache_dtype="float32", norm_eps=json.plain.get("layer_norm_epsilon"),
        rms_norm_eps=json.plain.get("layer_norm_epsilon"),
    )  # fmt: skip
    check_step_limits(json)
    json.without_effect(
        "chunk_size", "expand", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern",
        "mtp_layers_block_type", "num_logits_to_keep", "num_nextn_predict_layers", "partial_rotary_factor",
        "rescale_prenorm_residual", "residual_in_fp32", "rope_parameters", "rope_scaling", "rope_theta",
        "time_step_floor", "time_step_max", "time_step_rank", "use_mamba_kernels",
    )  # fmt: skip
    mixture = None
    if "moe" in kinds:
        mixture = _mixture(json)
    else:
        json.without_effect(*_OF_EXPERTS)
    config = read_layers(
        json,
        num_kv_heads=8,
        head_dim=_HEAD_DIM,
        eps_name="layer_norm_epsilon",
        eps=1e-5,
        activation=json.choice("mlp_hidden_act", ("relu2",), "relu2"),
        intermediate_size=read_size(json, "intermediate_size", 21_504),
        num_layers=len(kinds),
        ropes=[None] * len(kinds),
        mixers=[mixer if kind == "linear_attention" else None for kind in kinds],
        mixtures=[mixture if kind == "moe" else None for kind in kinds],
        mlp_bias=json.boolean("mlp_bias", False),
        gated_mlp=False,
        renamed=_NAMES,
        ignored_tensors=(r"^mtp\.",),
    )
    layers = (
        replace(layer, attends=(attends := kind in ("linear_attention", "full_attention")), has_mlp=not attends)
        for layer, kind in zip(config.layers, kinds, strict=True)
    )
    return replace(config, layers=tuple(layers))


def _kinds(json: ReadKeys) -> list[str]:
    """The kind of each layer."""
    found = []
    for name in ("layers_block_type", "layer_types"):
        listed = json.plain.get(name)
        kinds = json.choices(name, (*_KINDS.values(), *_OLDER), len(listed) if isinstance(listed, list) else 1)
        found += [[_OLDER.get(kind, kind) for kind in kinds]] if kinds else []
    if (letters := json.plain.get("hybrid_override_pattern")) is not None:
        if not isinstance(letters, str) or not letters or {*letters} - _KINDS.keys():
            raise ValueError(f"hybrid_override_pattern is {shown(letters)}; it must be letters of M, *, - and E")
        found.append([_KINDS[letter] for letter in letters])
    json.without_effect("hybrid_override_pattern")
    kinds = found[0] if found else [*_KINDS.values()]
    if any(other != kinds for other in found):
        raise ValueError("layers_block_type and hybrid_override_pattern say different layers")
    if (count := json.integer("num_hidden_layers", len(kinds), null=len(kinds))) != len(kinds):
        raise ValueError(
            f"num_hidden_layers is {count}, and layers_block_type or hybrid_override_pattern says {len(kinds)} layers"
        )
    if len(kinds) > MAX_LAYERS or "linear_attention" not in kinds:
        raise ValueError(f"there are {len(kinds)} layers; there must be at most {MAX_LAYERS}, and one of Mamba-2")
    return kinds


def _mamba2(json: ReadKeys) -> Mamba2:
    json.choice("mamba_hidden_act", ("silu",), "silu")
    return Mamba2(
        heads=json.integer("mamba_num_heads", 128, most=2**16),
        head_dim=json.integer("mamba_head_dim", 64, most=2**16),
        columns=json.integer("ssm_state_size", 128, most=2**16),
        groups=json.integer("n_groups", 8),
        taps=json.integer("conv_kernel", 4, least=2, most=MAX_TAPS),
        convolution_bias=json.boolean("use_conv_bias", True),
        projection_bias=json.boolean("use_bias", False),
        # transformers applies it to prompts. Without it, the state would depend on what is computed as a prompt.
        least_step=float(json.number("time_step_min", 0.001)),
    )


def _mixture(json: ReadKeys) -> Mixture:
    num_experts, num_chosen = read_size(json, "n_routed_experts", 8), read_size(json, "num_experts_per_tok", 2)
    renormalise = json.boolean("norm_topk_prob", True)
    scale = float(json.number("routed_scaling_factor", 1.0))
    groups = read_size(json, "n_group", 1), read_size(json, "topk_group", 1)
    json.neutral(n_shared_experts=1)
    return Mixture(
        num_experts,
        num_chosen,
        read_size(json, "moe_intermediate_size", 7688),
        renormalise,
        MixtureNames("mixer.gate", "mixer.experts", gate="up_proj", up=None, down="down_proj"),
        Routing(num_experts, num_chosen, True, renormalise, scale, *groups),
        read_size(json, "moe_shared_expert_intermediate_size", 7688),
        latent_size=read_size(json, "moe_latent_size", 0, null=0) or None,
    )
