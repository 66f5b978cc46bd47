"""Reads the config.json of families whose layers keep states, or in which such layers alternate with attention."""

from collections.abc import Callable, Sequence
from typing import Any

from kernels.linear.experts import Routing
from worker_service.models.config.config_limits import MAX_EXPERTS, MAX_LAYERS
from worker_service.models.config.rope import read_axial_rope, read_rope
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture, MixtureNames
from worker_service.models.decoders.readers.family_keys import (
    check_step_limits,
    head_dim_of,
    num_layers_of,
    read_layers,
    read_size,
)
from worker_service.models.decoders.states.nemotron import read_nemotron_h
from worker_service.models.layers.mixers import MAX_TAPS, DeltaNet, Mamba2, ShortConvolution
from worker_service.read_keys import ReadKeys

_ATTENTION = {"full_attention": True, "attention": True}
_LINEAR = _ATTENTION | {"linear_attention": False, "mamba": False}
"""Kinds of layers, older names among them, and whether they are attention."""
_LFM2_NAMES = (
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("model.norm", "model.embedding_norm"),
)
_GRANITE_NAMES = tuple(
    (f"{ours}.{projection}", f"shared_mlp.{theirs}")
    for ours in ("mlp.shared_experts", "mlp")
    for projection, theirs in (("gate_up_proj", "input_linear"), ("down_proj", "output_linear"))
)
_GRANITE_EXPERTS = MixtureNames(
    "block_sparse_moe.router.layer", "block_sparse_moe.experts", gate="input_linear", up=None, down="output_linear"
)
_QWEN_EXPERTS = MixtureNames("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")


def read_lfm2(json: ReadKeys) -> DecoderConfig:
    """Llama with normalised queries and keys, and short convolutions in place of most attention. (Liquid AI, 2025.)"""
    hidden_size, num_layers = read_size(json, "hidden_size"), num_layers_of(json)
    if (is_attention := _lfm2_attends(json)) is None:
        attends = json.integers("full_attn_idxs", least=0, most=MAX_LAYERS)
        is_attention = [attends is None or number in attends for number in range(num_layers)]
    else:
        json.without_effect("full_attn_idxs")
    json.neutral(
        block_dim=hidden_size, conv_dim=hidden_size, conv_dim_out=hidden_size, hidden_act="silu",
        block_norm_eps=json.plain.get("norm_eps"), num_heads=json.plain.get("num_attention_heads"),
        block_use_swiglu=True, use_pos_enc=True,
    )  # fmt: skip
    json.without_effect("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    return _read_lfm2(json, is_attention, intermediate_size=_lfm2_inner(json), renamed=_LFM2_NAMES)


def read_lfm2_moe(json: ReadKeys) -> DecoderConfig:
    """LFM2 whose first layers are dense, and whose other layers have experts. Scores of experts are sigmoids."""
    if (is_attention := _lfm2_attends(json)) is None:
        raise ValueError("layer_types is missing; it must say which layers are attention")
    num_experts, num_chosen = read_size(json, "num_experts", 32), read_size(json, "num_experts_per_tok", 4)
    renormalise, scale = json.boolean("norm_topk_prob", True), float(json.number("routed_scaling_factor", 1.0))
    mixture = Mixture(
        num_experts,
        num_chosen,
        read_size(json, "moe_intermediate_size", 1792),
        renormalise,
        MixtureNames("feed_forward.gate", "feed_forward.experts", gate="w1", up="w3", down="w2"),
        Routing(
            num_experts, num_chosen, True, renormalise, scale, has_bias=json.boolean("use_expert_bias", True),
            least_sum=1e-6,
        ),
    )  # fmt: skip
    num_dense = json.integer("num_dense_layers", 2, least=0)
    return _read_lfm2(
        json,
        is_attention,
        intermediate_size=read_size(json, "intermediate_size", 7168),
        mixtures=[mixture if number >= num_dense else None for number in range(len(is_attention))],
        renamed=(("feed_forward.gate.e_score_correction_bias", "feed_forward.expert_bias"), *_LFM2_NAMES),
    )


def _lfm2_attends(json: ReadKeys) -> list[bool] | None:
    kinds = json.choices("layer_types", (*_ATTENTION, "conv"), num_layers_of(json))
    return None if kinds is None else [kind in _ATTENTION for kind in kinds]


def _read_lfm2(json: ReadKeys, is_attention: Sequence[bool], **options: Any) -> DecoderConfig:
    taps, biased = _taps(json, "conv_L_cache", 3), json.boolean("conv_bias", False)
    mixer = ShortConvolution(read_size(json, "hidden_size"), taps, biased)
    rope, tied = read_rope(json, head_dim_of(json), 1_000_000.0), json.boolean("tie_word_embeddings", True)
    json.neutral(theta=json.plain.get("rope_theta", json.group("rope_parameters").plain.get("rope_theta")))
    return read_layers(
        json,
        num_kv_heads=8,
        eps_name="norm_eps",
        eps=1e-5,
        activation="silu",
        tied_embeddings=json.boolean("tie_embedding", tied),
        ropes=[rope if attends else None for attends in is_attention],
        mixers=[None if attends else mixer for attends in is_attention],
        qk_norm="head",
        **options,
    )


def _lfm2_inner(json: ReadKeys) -> int:
    """Inner units, which `block_auto_adjust_ff_dim` reduces to two thirds and rounds up."""
    size = read_size(json, "block_ff_dim", read_size(json, "intermediate_size", 12_288))
    multiple = json.integer("block_multiple_of", 256)
    multiplier = json.number("block_ffn_dim_multiplier", 1.0, null=None)
    if not json.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if multiplier is None:
        return size
    return -(-int(multiplier * size) // multiple) * multiple


def read_granite_hybrid(json: ReadKeys) -> DecoderConfig:
    """Granite 4: Mamba-2 and attention in turn, with factors on embeddings, residuals and logits; dense, or experts
    beside a shared one. (IBM, 2025.)"""
    num_layers, hidden_size = num_layers_of(json), read_size(json, "hidden_size")
    is_attention = _attends(json, [False] * num_layers)
    mixer = None
    if all(is_attention):
        json.without_effect("time_step_limit", *(name for name in json if name.startswith("mamba_")))
    else:
        mixer = _mamba2(json, hidden_size)
    rope = None
    if json.choice("position_embedding_type", ("rope", "nope"), "nope", null="nope") == "rope":
        rope = read_rope(json, head_dim_of(json))
    else:
        json.without_effect("rope_theta", "rope_parameters", "rope_scaling")
    json.neutral(normalization_function="rmsnorm")
    json.without_effect("init_method")
    mixture, shared = None, read_size(json, "shared_intermediate_size", 1024)
    inner = read_size(json, "intermediate_size", 11_008)
    if num_experts := json.integer("num_local_experts", 8, least=0, most=MAX_EXPERTS):
        num_chosen = read_size(json, "num_experts_per_tok", 2)
        mixture = Mixture(num_experts, num_chosen, inner, True, _GRANITE_EXPERTS, shared_size=shared)
    else:
        json.without_effect("num_experts_per_tok")
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        intermediate_size=shared,
        ropes=[rope if attends else None for attends in is_attention],
        mixers=[None if attends else mixer for attends in is_attention],
        mixtures=[mixture] * num_layers,
        attention_scale=float(json.number("attention_multiplier", 1.0)),
        embedding_scale=float(json.number("embedding_multiplier", 1.0)),
        scales_given=True,
        residual_scale=float(json.number("residual_multiplier", 1.0)),
        logit_divisor=float(json.number("logits_scaling", 1.0)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        fused_gate_up=True,
        renamed=_GRANITE_NAMES,
    )


def _mamba2(json: ReadKeys, hidden_size: int) -> Mamba2:
    json.choice("hidden_act", ("silu",), "silu")  # the convolution's, too
    json.without_effect("mamba_chunk_size")
    check_step_limits(json)
    heads, inner = json.integer("mamba_n_heads", 128, most=2**16), json.integer("mamba_expand", 2) * hidden_size
    json.neutral(mamba_d_head="auto")
    head_dim = inner // heads if json.plain.get("mamba_d_head", "auto") == "auto" else json.integer("mamba_d_head")
    if head_dim * heads != inner:
        raise ValueError(
            f"mamba_n_heads is {heads}, with mamba_d_head {head_dim}; their product must be mamba_expand times "
            f"hidden_size, {inner}"
        )
    return Mamba2(
        heads,
        head_dim,
        columns=json.integer("mamba_d_state", 256, most=2**16),
        groups=json.integer("mamba_n_groups", 1),
        taps=_taps(json, "mamba_d_conv", 4),
        convolution_bias=json.boolean("mamba_conv_bias", True),
        projection_bias=json.boolean("mamba_proj_bias", False),
    )


def read_qwen3_next(json: ReadKeys) -> DecoderConfig:
    """Three gated delta networks, then attention with gates; experts beside a shared one, which has a gate. (Qwen Team,
    2025.)"""
    num_layers, interval = num_layers_of(json), json.integer("decoder_sparse_step", 1)
    dense = json.integers("mlp_only_layers", least=0, most=MAX_LAYERS) or ()
    mixture = _qwen_mixture(json, 512, 10, json.boolean("norm_topk_prob", True))
    has_experts = [number not in dense and (number + 1) % interval == 0 for number in range(num_layers)]
    inner = read_size(json, "intermediate_size", 5632)
    return _read_qwen(
        json, [mixture if has else None for has in has_experts], by_head=True, kv_heads=2, intermediate_size=inner
    )


def read_qwen3_5(json: ReadKeys) -> DecoderConfig:
    """Qwen3-Next without experts, and with separate projections. (Qwen Team, 2026.)"""
    return _read_qwen(
        json, None, by_head=False, kv_heads=4, intermediate_size=read_size(json, "intermediate_size", 12_288)
    )


def read_qwen3_5_moe(json: ReadKeys) -> DecoderConfig:
    """Qwen3.5 with experts in all layers."""
    json.without_effect("intermediate_size")
    mixture = _qwen_mixture(json, 256, 8, True)
    return _read_qwen(
        json, [mixture] * num_layers_of(json), by_head=False, kv_heads=2, intermediate_size=mixture.intermediate_size
    )


def _qwen_mixture(json: ReadKeys, num_experts: int, num_chosen: int, renormalise: bool) -> Mixture:
    return Mixture(
        num_experts=read_size(json, "num_experts", num_experts),
        num_chosen=read_size(json, "num_experts_per_tok", num_chosen),
        intermediate_size=read_size(json, "moe_intermediate_size", 512),
        renormalise=renormalise,
        names=_QWEN_EXPERTS,
        shared_size=read_size(json, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def _read_qwen(
    json: ReadKeys, mixtures: Sequence[Mixture | None] | None, *, by_head: bool, kv_heads: int, **options: Any
) -> DecoderConfig:
    num_layers = num_layers_of(json)
    interval = json.integer("full_attention_interval", 4)
    is_attention = _attends(json, [(number + 1) % interval == 0 for number in range(num_layers)])
    mixer = None
    if all(is_attention):
        json.without_effect("mamba_ssm_dtype", *(name for name in json if name.startswith("linear_")))
    else:
        json.choice("hidden_act", ("silu",), "silu")  # the convolution's, too
        mixer = DeltaNet(
            key_heads=json.integer("linear_num_key_heads", 16, most=2**16),
            value_heads=json.integer("linear_num_value_heads", 32, most=2**16),
            key_dim=json.integer("linear_key_head_dim", 128, most=2**16),
            value_dim=json.integer("linear_value_head_dim", 128, most=2**16),
            taps=_taps(json, "linear_conv_kernel_dim", 4),
            by_head=by_head,
        )
    json.neutral(attn_output_gate=True, mamba_ssm_dtype="float32")
    for name in ("silu", "swish"):  # two names of the gates' activation in gated delta networks
        json.neutral(output_gate_type=name)
    json.without_effect("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    head_dim = head_dim_of(json, 256)
    if by_head:
        json.group("rope_parameters").without_effect("mrope_section", "mrope_interleaved")
        rope = read_rope(json, head_dim, parts_of_heads=True, share=0.25)
    else:
        rope = read_axial_rope(
            json, head_dim, sections=(11, 11, 10), is_interleaved=True, parts_of_heads=True, share=0.25
        )
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        num_kv_heads=kv_heads,
        head_dim=256,
        ropes=[rope if attends else None for attends in is_attention],
        mixers=[None if attends else mixer for attends in is_attention],
        mixtures=mixtures,
        qk_norm="head",
        gated_attention=True,
        norm_offset=1.0,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        renamed=(("mlp.shared_experts", "mlp.shared_expert"),),
        ignored_tensors=(r"^mtp\.",),
        **options,
    )


def _attends(json: ReadKeys, default: list[bool]) -> list[bool]:
    """Whether each layer is attention."""
    kinds = json.choices("layer_types", _LINEAR, len(default))
    return default if kinds is None else [_LINEAR[kind] for kind in kinds]


def _taps(json: ReadKeys, name: str, default: int) -> int:
    return json.integer(name, default, least=2, most=MAX_TAPS)


FAMILIES_WITH_STATES: dict[str, Callable[[ReadKeys], DecoderConfig]] = {
    "granitemoehybrid": read_granite_hybrid,
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2_moe,
    "nemotron_h": read_nemotron_h,
    "qwen3_5_moe_text": read_qwen3_5_moe,
    "qwen3_5_text": read_qwen3_5,
    "qwen3_next": read_qwen3_next,
}
