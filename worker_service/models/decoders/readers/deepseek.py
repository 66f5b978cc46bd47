"""Reads the config.json of DeepSeek V2 and V3, and of networks like V3. Kimi K2, GLM-4.7-Flash, GLM-4.5 and Mistral 4
have experts in groups beside shared ones. All but GLM-4.5 have latent attention. (DeepSeek-AI, 2024.)"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any

from kernels.linear.experts import Routing
from worker_service.models.config.rope import read_rope
from worker_service.models.decoders.decoder_config import DecoderConfig, Latent, Mixture, MixtureNames
from worker_service.models.decoders.readers.family_keys import (
    head_dim_of,
    mistral_rope,
    num_layers_of,
    read_layers,
    read_size,
    read_temperature,
    rope_parameters,
)
from worker_service.read_keys import REFUSED, ReadKeys

_NAMES = MixtureNames("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")
_STACKED = MixtureNames("mlp.gate", "mlp.experts", gate="gate_up_proj", up=None, down="down_proj")
_MISTRAL4_ROPE = mistral_rope(theta=10_000.0, factor=128.0, length=8192)


def read_deepseek_v2(json: ReadKeys) -> DecoderConfig:
    """A token's experts have the largest softmax scores, of all or within some groups."""
    # transformers ignores norm_topk_prob, and DeepSeek's own code obeys it.
    json.neutral(scoring_func="softmax", rope_interleave=True, norm_topk_prob=False)
    groups = 1, 1
    if json.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        json.without_effect("n_group", "topk_group")
    else:
        groups = read_size(json, "n_group"), read_size(json, "topk_group")
    mixture = _mixture(
        json, groups, is_sigmoid=False, renormalise=False, scale=1.0, num_experts=64, size=1407, num_shared=2
    )
    return _read(
        json,
        mixture,
        _after(json, 0),
        query_rank=1536,
        interleaved=True,
        sizes=(512, 128, 64, 128),
        mlp_bias=json.boolean("mlp_bias", False),
    )


def read_deepseek_v3(json: ReadKeys) -> DecoderConfig:
    """A token's experts have the largest sigmoid scores plus a trained bias, within some groups."""
    mixture = _v3_mixture(json, (8, 4), scale=2.5, num_experts=256, num_chosen=8, size=2048)
    return _read_like_v3(json, mixture, _after(json, 3), query_rank=1536, sizes=(512, 128, 64, 128))


def read_glm4_moe_lite(json: ReadKeys) -> DecoderConfig:
    """DeepSeek V3 with other defaults, and a list of the layers with experts. (GLM-4.7-Flash; Z.ai, 2026.)"""
    mixture = _v3_mixture(json, (1, 1), scale=1.8, num_experts=64, num_chosen=4, size=1536)
    num_layers = num_layers_of(json)
    kinds = json.choices("mlp_layer_types", ("dense", "sparse"), num_layers) or ["dense"] + ["sparse"] * num_layers
    has_experts = [kind == "sparse" for kind in kinds[:num_layers]]
    first = [*has_experts, True].index(True)
    if all(has_experts[first:]):
        json.neutral(first_k_dense_replace=first)
    return _read_like_v3(json, mixture, has_experts, query_rank=768, sizes=(512, 192, 64, 256), eps=1e-5)


def read_glm4_moe(json: ReadKeys) -> DecoderConfig:
    """DeepSeek V3's experts, with keys and values of single heads, which are rotated in part. (GLM-4.5 to 4.7; Z.ai,
    2025.)"""
    mixture = _v3_mixture(json, (1, 1), scale=1.0, num_experts=128, num_chosen=8, size=1408)
    has_experts = _after(json, 1)
    return read_layers(
        json,
        num_kv_heads=8,
        eps=1e-5,
        ropes=[read_rope(json, head_dim_of(json), parts_of_heads=True, share=0.5)] * len(has_experts),
        mixtures=[mixture if has else None for has in has_experts],
        qk_norm="head" if json.boolean("use_qk_norm", False) else None,
        qkv_bias=json.boolean("attention_bias", False),
        ignored_tensors=_mtp_layers(json),
    )


def read_mistral4(json: ReadKeys) -> DecoderConfig:
    """DeepSeek V3 with softmax scores, without a trained bias, and with queries that grow with their positions, as in
    Llama 4. (Mistral AI, 2026.)"""
    plain, rotary = read_size(json, "qk_nope_head_dim", 64), read_size(json, "qk_rope_head_dim", 64)
    head_dim, parameters = plain + rotary, rope_parameters(json, _MISTRAL4_ROPE)
    if (said := json.integer("head_dim", head_dim, null=head_dim)) != head_dim:
        raise ValueError(f"head_dim is {said}; it must be qk_nope_head_dim + qk_rope_head_dim, which is {head_dim}")
    for keys in (json, parameters):
        share = keys.number("partial_rotary_factor", None, null=None)
        if share not in (None, rotary / head_dim):
            raise ValueError(
                f"partial_rotary_factor is {share}; it must be the rotated part of a head, {rotary / head_dim}"
            )
    mixture = _mixture(
        json,
        (read_size(json, "n_group", 1), read_size(json, "topk_group", 1)),
        is_sigmoid=False,
        renormalise=json.boolean("norm_topk_prob", True),
        scale=1.0,
        num_experts=128,
        num_chosen=4,
        size=2048,
        num_shared=1,
        names=_STACKED,
        sums_pairs=True,
    )
    interleaved = json.boolean("rope_interleave", True, null=False)
    config = _read(
        json,
        mixture,
        _after(json, 0),
        query_rank=1024,
        interleaved=interleaved,
        sizes=(256, 64, 64, 128),
        rope=_MISTRAL4_ROPE,
    )
    temperature = read_temperature(json, parameters)
    return replace(config, layers=tuple(replace(layer, temperature=temperature) for layer in config.layers))


def read_youtu(json: ReadKeys) -> DecoderConfig:
    """DeepSeek V3 without experts. (Tencent Youtu Lab, 2025.)"""
    json.without_effect("embedding_initializer_range")
    dense = [False] * num_layers_of(json)
    return _read_like_v3(json, None, dense, query_rank=1536, sizes=(512, 128, 64, 128), tied_embeddings=True)


def read_minicpm3(json: ReadKeys) -> DecoderConfig:
    """DeepSeek V2's attention with undivided pairs of rotated elements, without experts. Embeddings, residuals and
    logits are scaled. (OpenBMB, 2024.)"""
    num_layers, hidden = num_layers_of(json), read_size(json, "hidden_size")
    depth = json.number("scale_depth", 1.4, null=num_layers**0.5)
    value_dim = hidden // (num_heads := read_size(json, "num_attention_heads"))
    if not value_dim and json.plain.get("v_head_dim") is None:
        raise ValueError(f"hidden_size is {hidden}; without v_head_dim, it must be at least {num_heads}")
    return _read(
        json,
        None,
        [False] * num_layers,
        query_rank=768,
        interleaved=False,
        sizes=(256, 64, 32, value_dim),
        null_value=value_dim,
        eps=1e-5,
        tied_embeddings=True,
        mlp_bias=json.boolean("mlp_bias", False),
        embedding_scale=float(json.number("scale_emb", 12)),
        residual_scale=float(depth) / num_layers**0.5,
        logit_divisor=hidden / json.integer("dim_model_base", 256, null=hidden),
    )


def _read_like_v3(
    json: ReadKeys, mixture: Mixture | None, has_experts: Sequence[bool], *, query_rank: int,
    sizes: tuple[int, int, int, int], **options: Any,
) -> DecoderConfig:  # fmt: skip
    interleaved = json.boolean("rope_interleave", True, null=False)
    return _read(
        json,
        mixture,
        has_experts,
        query_rank=query_rank,
        interleaved=interleaved,
        sizes=sizes,
        ignored_tensors=_mtp_layers(json),
        **options,
    )


def _mtp_layers(json: ReadKeys) -> tuple[str, ...]:
    """Patterns for tensors of the layers for multi-token prediction, which are behind the last layer in a checkpoint
    and are not used. Without a count there are none: a further layer could be one that the network lacks."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")  # the second is from transformers
    counts = {json.integer(name, least=0, most=8) for name in names if name in json}
    if len(counts) > 1:
        raise ValueError(f"{names[0]} and {names[1]} say different numbers")
    num_layers = num_layers_of(json)
    return tuple(rf"^model\.layers\.{num_layers + number}\." for number in range(min(counts, default=0)))


def _v3_mixture(json: ReadKeys, groups: tuple[int, int], *, scale: float, **defaults: Any) -> Mixture:
    json.neutral(topk_method="noaux_tc", scoring_func="sigmoid")
    groups = read_size(json, "n_group", groups[0]), read_size(json, "topk_group", groups[1])
    renormalise = json.boolean("norm_topk_prob", True)
    return _mixture(json, groups, is_sigmoid=True, renormalise=renormalise, scale=scale, num_shared=1, **defaults)


def _mixture(
    json: ReadKeys, groups: tuple[int, int], *, is_sigmoid: bool, renormalise: bool, scale: float, num_experts: int,
    size: int, num_shared: int, num_chosen: int = REFUSED, names: MixtureNames = _NAMES, sums_pairs: bool = False,
) -> Mixture:  # fmt: skip
    """scale to num_chosen: the family's defaults. sums_pairs: see `Routing`."""
    size = read_size(json, "moe_intermediate_size", size)
    num_experts = read_size(json, "n_routed_experts", num_experts)
    num_chosen = read_size(json, "num_experts_per_tok", num_chosen)
    scale = float(json.number("routed_scaling_factor", scale))
    return Mixture(
        num_experts,
        num_chosen,
        size,
        renormalise,
        names,
        Routing(num_experts, num_chosen, is_sigmoid, renormalise, scale, *groups, sums_pairs=sums_pairs),
        size * read_size(json, "n_shared_experts", num_shared),
    )


def _after(json: ReadKeys, default: int) -> list[bool]:
    """Whether each layer has experts. default: the family's number of first layers without."""
    json.neutral(moe_layer_freq=1)
    first = json.integer("first_k_dense_replace", default, least=0)
    return [number >= first for number in range(num_layers_of(json))]


def _read(
    json: ReadKeys, mixture: Mixture | None, has_experts: Sequence[bool], *, query_rank: int, interleaved: bool,
    sizes: tuple[int, int, int, int], null_value: int = REFUSED, rope: Mapping[str, Any] | None = None, **options: Any,
) -> DecoderConfig:  # fmt: skip
    """query_rank, sizes, rope: the family's defaults. null_value: what null means for `v_head_dim`."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    rank, plain, rotary = (read_size(json, name, size) for name, size in zip(names, sizes, strict=False))
    value = read_size(json, "v_head_dim", sizes[3], null=null_value)
    latent = Latent(rank, read_size(json, "q_lora_rank", query_rank, null=0) or None, plain, rotary, value, interleaved)
    attention_bias = json.boolean("attention_bias", False)
    return read_layers(
        json,
        ropes=[read_rope(json, rotary, default=rope)] * len(has_experts),
        mixtures=[mixture if has else None for has in has_experts],
        attention_scale=latent.query_dim**-0.5 * _yarn_scale(rope_parameters(json, rope).plain),
        latent=latent,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        **options,
    )


def _yarn_scale(parameters: Mapping[str, Any]) -> float:
    """YaRN's factor on the softmax's scale, by `mscale_all_dim`. parameters: those that `read_rope` has checked."""
    all_dim = parameters.get("mscale_all_dim")
    if not all_dim:
        return 1.0
    if (factor := parameters.get("factor")) is None:
        raise ValueError("mscale_all_dim is in the rotary parameters without factor, which it needs")
    return 1.0 if factor <= 1 else (0.1 * all_dim * log(factor) + 1.0) ** 2
