"""Refuses keys of a config.json that transformers' code does not read; transformers itself accepts every key."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

from transformers import PreTrainedConfig

from worker_service.models.config.config_keys import HARMLESS, check_all_read, refuse
from worker_service.models.config.rope import NOTES, ROPE_KEYS, check_truncates
from worker_service.models.config.transformers_json import PROPERTIES, parse
from worker_service.read_keys import ReadKeys
from worker_service.wording import shown

_READS = re.compile(r"""config(?:\.|, ["'])(\w+)""")
_READS_OF_ROPE = re.compile(r"""rope_parameters(?:\[|\.get\()["'](\w+)["']""")
_TAKES = re.compile(r"""kwargs(?:\.get\(|\.pop\(|\[)\s*["'](\w+)["']""")
_REPEATED = {
    "activation_function": "hidden_act", "layer_norm_eps": "norm_eps", "layer_norm_epsilon": "norm_epsilon",
    "n_ctx": "max_position_embeddings", "norm_eps": "layer_norm_eps", "use_embedding_sharing": "tie_word_embeddings",
}  # fmt: skip
"""Older names of keys. Old and new key must have equal values."""
_REPEATED_OF_ROPE = {
    "partial_rotary_factor": "partial_rotary_factor", "rope_pct": "partial_rotary_factor",
    "rope_percent": "partial_rotary_factor", "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor",
}  # fmt: skip
"""Top-level keys with the same meaning as in `rope_parameters`; transformers may use either, so both must be equal."""
_FULL_LAYERS = {"_sliding_window_pattern": 1, "global_attn_every_n_layers": 0, "layer_switch": 1,
                "sliding_window_pattern": 1}  # fmt: skip
"""Keys by which every n-th layer has full attention, with the number to add before layer numbers are divided by n."""
_IN_FLOAT32 = {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True}
_HUNYUAN = {
    "add_classification_head": False,
    "norm_type": "rms",
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
_NEUTRAL: Mapping[str, Mapping[str, object]] = {
    "afmoe": {
        "n_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "route_norm": True, "score_func": "sigmoid",
        "topk_group": 1,
    },
    "apertus": {"post_norm": False, "qk_norm": True},
    "bamba": {"attn_rotary_emb": 64},
    "bloom": {
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True,
        "offset_alibi": 100, "seq_length": 2_048, "skip_bias_add": True, "skip_bias_add_qkv": False,
    },
    "cohere2": {
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "use_gated_activation": True, "use_parallel_block": True,
    },
    "codegen": {"scale_attn_weights": True},
    "ctrl": {"n_ctx": 512},
    "dots1": {"moe_layer_freq": 1, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"},
    "ernie4_5": {"compression_ratio": 1},
    "ernie4_5_moe": {"moe_gate": "topk", "moe_use_aux_free": True},
    "falcon": {"apply_residual_connection_post_layernorm": False},
    "falcon_h1": {"mamba_use_mlp": True},
    "falcon_mamba": {"fused_add_norm": True, "rms_norm": True},
    "gemma3n_text": {"altup_lr_multiplier": 1.0, "query_pre_attn_scalar": 256},  # of training; the scale is 1
    # GPT-SW3's attention divides and multiplies by a layer's number, so that its scores are GPT-2's.
    "gpt2": {
        "apply_query_key_layer_scaling": True, "n_special": 0, "normalize_attention_scores": True,
        "predict_special_tokens": True,
    },
    "gptj": {"rotary": True, "scale_attn_weights": True},
    "granitemoehybrid": {"normalization_function": "rmsnorm"},
    "hunyuan_v1_dense": _HUNYUAN,
    "jamba": {"calc_logits_for_entire_prompt": False, "mamba_inner_layernorms": True, "num_logits_to_keep": 1},
    "kimi_linear": {
        "mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0, "use_grouped_topk": True,
    },
    "mamba": {"fused_add_norm": True, "pad_vocab_size_multiple": 8, "rms_norm": True},
    "mamba2": {
        "fused_add_norm": True, "rms_norm": True, "time_step_init_scheme": "random",
        "time_step_scale": 1.0,
    },
    "modernbert": {"position_embedding_type": "sans_pos"},
    "openai-gpt": {"n_special": 0, "predict_special_tokens": True},
    "opt": {"learned_embeddings": True, "scale_embeddings": False},
    # StarCoder2's first files say "gelu", but the network uses hidden_act.
    "starcoder2": {"activation_function": "gelu", "mlp_type": "default", "norm_type": "layer_norm", **_IN_FLOAT32},
    "stablelm": {"rotary_scaling_factor": 1},
}  # fmt: skip
"""Unread keys in published files, by family, with the only value accepted, which transformers' code always uses."""

_UNUSED: Mapping[str, tuple[str, ...]] = {
    "afmoe": ("load_balance_coeff", "use_grouped_mm"),
    "ernie4_5_moe": ("num_nextn_predict_layers",),  # these layers are not loaded
    "gpt_neox": ("num_steps",),
    # Keys of a classifier, of images, and of layers that share keys. No layers share keys, because `use_cla` must be
    # false.
    "hunyuan_v1_dense": (
        "cla_share_factor", "class_num", "dense_list", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id",
        "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id",
    ),
    # transformers' code multiplies by gates before the norm, also for Codestral's file, which says true.
    "mamba2": ("norm_before_gate",),
}  # fmt: skip
"""Unread keys in published files, by family, that have no effect with any value: notes on the training, settings of
other programs, and parameters of what the network does not have."""

_ONLY: Mapping[str, Mapping[str, object]] = {
    "mpt": {
        "attn_config.alibi": True, "attn_config.alibi_bias_max": 8, "attn_config.attn_type": "multihead_attention",
        "attn_config.attn_uses_sequence_id": False, "attn_config.prefix_lm": False, "attn_config.qk_ln": False,
        "embedding_fraction": 1.0, "expansion_ratio": 4, "logit_scale": None, "no_bias": True,
    },
    "qwen2_audio_encoder": {"scale_embedding": False},
    "voxtral_encoder": {"scale_embedding": False},
}  # fmt: skip
"""Fields of transformers' classes that their code does not read, by family, with the value that the code implements."""


def _share_of_heads(network: Any) -> float:
    return (network.rope_parameters or {}).get("partial_rotary_factor") or 1


def _of_mimo(network: Any) -> dict[str, object]:
    """MiMo V2 Flash; transformers' class computes the layers' kinds in place of reading them."""
    window = network.sliding_window - 1  # transformers counts the token itself
    return {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_chunk_size": window,
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in network.layer_types],
        "layernorm_epsilon": network.rms_norm_eps,
        "moe_layer_freq": [int(kind == "sparse") for kind in network.mlp_layer_types],
        "scoring_func": "sigmoid",
        "swa_head_dim": network.head_dim,
        "swa_num_attention_heads": network.num_attention_heads,
        "swa_num_key_value_heads": 2 * network.num_key_value_heads,
        "swa_rope_theta": network.rope_parameters.get("sliding_attention", {}).get("rope_theta"),
        "swa_v_head_dim": network.v_head_dim,
        "topk_method": "noaux_tc",
    }


_COMPUTED: Mapping[str, Callable[[Any], Mapping[str, object]]] = {
    # With this capacity, no expert is ever full.
    "ernie4_5_moe": lambda network: {"moe_capacity": [network.moe_num_experts] * 3},
    "falcon": lambda network: {"ff_factor": network.ffn_hidden_size / network.hidden_size},
    "hunyuan_v1_dense": lambda network: {"attention_head_dim": network.head_dim},
    "kimi_linear": lambda network: {"head_dim": network.hidden_size // network.num_attention_heads},
    "mamba": lambda network: {
        "d_inner": network.intermediate_size, "d_model": network.hidden_size, "n_layer": network.num_hidden_layers,
    },
    "mamba2": lambda network: {"intermediate_size": int(network.expand * network.hidden_size)},
    "mimo_v2_flash": _of_mimo,
    "nemotron": lambda network: {"kv_channels": network.head_dim},
    "phi": lambda network: {
        "rotary_dim": network.hidden_size // network.num_attention_heads * _share_of_heads(network),
    },
    "persimmon": lambda network: {"num_key_value_heads": network.num_attention_heads},
}  # fmt: skip
"""Unread keys in published files, by family, with the values that follow from transformers' configuration object."""
_OF_LINEAR_ATTENTION = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention",
                        "head_dim": None, "num_heads": None, "short_conv_kernel_size": None}  # fmt: skip
"""Keys of Kimi Linear's `linear_attn_config`; lists of layers, counted from 1, with the layers' kind."""


def check_known(json: Mapping[str, Any], network: Any, network_class: Any) -> None:
    """Raise ValueError for a key that transformers' class and the network's code ignore and HARMLESS lacks. network:
    result of `parse` for this config.json."""
    keys, read = ReadKeys(json), _matches(_READS, network_class)
    keys.without_effect("architectures", "model_type", *(name for name in json if _is_known(name, network, read)))
    keys.neutral(**_NEUTRAL.get(network.model_type, {}))
    keys.without_effect(*_UNUSED.get(network.model_type, ()))
    if (computed := _COMPUTED.get(network.model_type)) is not None:
        keys.neutral(**computed(network))
    keys.neutral(**{name: getattr(network, other) for name, other in _REPEATED.items() if hasattr(network, other)})
    properties = {name for name in json if isinstance(getattr(type(network), name, None), property)}
    keys.neutral(**{name: getattr(network, name) for name in properties - PROPERTIES})
    if not getattr(network, "sliding_window", None):
        keys.neutral(use_sliding_window=False)
    _check_full_layers(keys, network)
    if network.model_type == "kimi_linear":
        _check_kimi_linear(keys, network)
    _check_repeated_of_rope(keys, network)
    for name, value in _ONLY.get(network.model_type, {}).items():
        if (said := attrgetter(name)(network)) != value:
            raise ValueError(f"{name} is {shown(said)}; transformers' code of a model {network.model_type} ignores it")
    _check_computed(keys)
    check_all_read(keys, network.model_type)
    for parameters in rope_parameters_of(network):
        if parameters is not network.rope_parameters:
            check_truncates(parameters)
        _check_rope(ReadKeys(parameters), network.model_type, _matches(_READS_OF_ROPE, network_class))


def rope_parameters_of(network: Any) -> list[Mapping[str, Any]]:
    """One entry for all layers, or one for each kind of layer."""
    parameters = getattr(network, "rope_parameters", None) or {}
    nested = [one for one in parameters.values() if isinstance(one, Mapping)]
    return nested or ([parameters] if parameters else [])


def _is_known(name: str, network: Any, read: frozenset[str]) -> bool:
    """read: keys that the network's code reads."""
    config_class = type(network)
    own = {field.name for field in fields(config_class)}
    if name in own.union(config_class.attribute_map, config_class.attribute_map.values()):
        return True
    if name.startswith("_") or hasattr(config_class, name):  # not passed by `parse`
        return name == "per_layer_config" or (name == "rope_scaling" and hasattr(network, "rope_parameters"))
    classes = config_class.__mro__[: config_class.__mro__.index(PreTrainedConfig)]
    return not hasattr(network, name) or name in read.union(*(_matches(_TAKES, one) for one in classes))


@cache
def _matches(pattern: re.Pattern[str], of_class: type) -> frozenset[str]:
    """All matches in the module that defines the class."""
    return frozenset(pattern.findall(inspect.getsource(sys.modules[of_class.__module__])))


def _check_computed(keys: ReadKeys) -> None:
    """Mark keys as read that transformers' class computes from the others, with the values that it computes."""
    unread = keys.unread().keys() - HARMLESS
    if unread:
        others = parse({name: value for name, value in keys.plain.items() if name not in unread})
        keys.neutral(**{name: getattr(others, name) for name in unread & vars(others).keys()})


def _check_full_layers(keys: ReadKeys, network: Any) -> None:
    """Raise ValueError if `_FULL_LAYERS` contradicts `layer_types`."""
    kinds, own = getattr(network, "layer_types", None), {field.name for field in fields(network)}
    for name, first in _FULL_LAYERS.items():
        every = keys.plain.get(name)
        if kinds is None or every is None or name in own:  # `own`: default for missing layer_types
            continue
        if type(every) is not int or every < 1:
            raise ValueError(f"{name} is {shown(every)}; it must be a whole number from 1 on")
        are_full = [(number + first) % every == 0 for number in range(len(kinds))]
        if are_full != [kind == "full_attention" for kind in kinds]:
            raise ValueError(f"{name} is {shown(every)}, and the layers with a window are others (layer_types)")
        keys.without_effect(name)


def _check_kimi_linear(keys: ReadKeys, network: Any) -> None:
    """Raise ValueError for a part of `linear_attn_config` that transformers' class ignores. Without positions,
    `rope_theta` has no effect."""
    for name, value in (keys.plain.get("linear_attn_config") or {}).items():
        kind, said = _OF_LINEAR_ATTENTION.get(name), value
        if kind is not None:
            said = [number for number, of_layer in enumerate(network.layer_types, 1) if of_layer == kind]
        if name not in _OF_LINEAR_ATTENTION or said != value:
            refuse({f"linear_attn_config.{name}": value}, network.model_type)
    if keys.plain.get("mla_use_nope") is True:
        keys.without_effect("rope_theta")


def _check_repeated_of_rope(keys: ReadKeys, network: Any) -> None:
    """Raise ValueError if top-level keys contradict the rotary embeddings' parameters."""
    newer, older = keys.plain.get("rope_parameters") or {}, keys.plain.get("rope_scaling") or {}
    if newer and older and newer != older:
        raise ValueError("rope_parameters and rope_scaling differ")
    for name, inner in _REPEATED_OF_ROPE.items():
        value, every = keys.plain.get(name), rope_parameters_of(network)
        found = [one.get(inner, 1 if inner == "partial_rotary_factor" else None) for one in every]
        if value is None or not every:
            continue
        if value not in found:
            raise ValueError(f"{name} is {shown(value)}, and {inner} {shown(found[0])} in the rotary parameters")
        keys.without_effect(name)


def _check_rope(parameters: ReadKeys, family: str, read: frozenset[str]) -> None:
    kind = parameters.plain.get("rope_type")
    parameters.without_effect(*read)
    parameters.without_effect("type", "rope_theta", "partial_rotary_factor", *NOTES, *ROPE_KEYS.get(str(kind), ()))
    parameters.without_effect("rope_type", "original_max_position_embeddings")  # types without these keys ignore them
    if family.startswith("hunyuan_v1_") and parameters.plain.get("alpha"):
        _check_alpha(parameters, kind, family)
    check_all_read(parameters, f"{family} with positions of type {kind}")


def _check_alpha(parameters: ReadKeys, kind: object, family: str) -> None:
    """Raise ValueError unless `alpha`, which Hunyuan's code applies to positions of one type, is the only factor."""
    without = {"factor": 1, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1}
    said = {name: parameters.plain[name] for name in without if name in parameters}
    others = {name: value for name, value in said.items() if value != without[name]}
    refuse(others | ({} if kind == "dynamic" else {"rope_type": kind}), f"{family} with alpha in its positions")
    parameters.without_effect(*said)
