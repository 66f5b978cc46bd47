"""How the config.json of each native family reads as a `DecoderConfig`: one function a family.

Where a file leaves out anything but sizes, the family's own default holds, as transformers has it. All raise
ValueError, KeyError or TypeError for a file that describes no such network. What a function does not read is refused
by `config_keys.check_all_read`, unless it changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker_service.models.config_keys import check_all_read, check_generates
from worker_service.models.decoder_config import DecoderConfig, LayerConfig, Mixture, MixtureNames
from worker_service.models.rope import Rope, agreed, read_rope, rope_of
from worker_service.read_keys import ReadKeys

_OTHER_LENGTHS = ("max_seq_len", "max_seq_length", "max_sequence_length", "seq_len", "seq_length")
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def _llama(json: ReadKeys) -> DecoderConfig:
    """Touvron et al., 2023; SmolLM2 too."""
    if json.plain.get("hidden_act", "silu") == "silu":
        json.neutral(activation="swiglu")  # Falcon 3's files have both
    attention_bias = bool(json.get("attention_bias", False))
    return _read(json, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=bool(json.get("mlp_bias", False)))


def _mistral(json: ReadKeys) -> DecoderConfig:
    """Llama with a sliding window in every layer. (Jiang et al., 2023.)"""
    return _read(json, num_kv_heads=8, windows=[json.get("sliding_window", 4096)] * int(json["num_hidden_layers"]))


def _mixtral(json: ReadKeys) -> DecoderConfig:
    """Mistral with experts in every layer. (Jiang et al., 2024.)"""
    num_layers = int(json["num_hidden_layers"])
    mixture = Mixture(
        num_experts=_num_experts(json, 8),
        num_chosen=int(json.get("num_experts_per_tok", 2)),
        intermediate_size=int(json["intermediate_size"]),
        renormalise=True,
        names=MixtureNames("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
    )
    return _read(
        json,
        num_kv_heads=8,
        eps=1e-5,
        ropes=[read_rope(json, _head_dim(json), 1_000_000.0)] * num_layers,
        windows=[json.get("sliding_window")] * num_layers,
        mixtures=[mixture] * num_layers,
    )


def _qwen2(json: ReadKeys) -> DecoderConfig:
    """Biases on query, key and value; windows in the layers behind the first ones, if at all. (Yang et al., 2024.)"""
    json.neutral(attention_bias=True)
    return _read(json, qkv_bias=True, num_kv_heads=32, windows=_qwen_windows(json))


def _mimo(json: ReadKeys) -> DecoderConfig:
    """Qwen2 with a layer for multi-token prediction beside it, for --speculate mtp. (Xiaomi LLM-Core Team, 2025.)"""
    json.without_effect("num_nextn_predict_layers")
    return _qwen2(json)


def _qwen3(json: ReadKeys) -> DecoderConfig:
    """Normalised queries and keys in place of the biases. (Yang et al., 2025.)"""
    attention_bias = bool(json.get("attention_bias", False))
    return _read(
        json,
        qk_norm=True,
        num_kv_heads=32,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        head_dim=128,
        windows=_qwen_windows(json),
    )


def _qwen3_moe(json: ReadKeys) -> DecoderConfig:
    """Qwen3 with experts in all layers, or in all but some. A window, if any, is in all layers. (Yang et al., 2025.)"""
    json.neutral(use_qk_norm=True)
    num_layers, interval = int(json["num_hidden_layers"]), int(json.get("decoder_sparse_step", 1))
    if interval < 1:
        raise ValueError(f"decoder_sparse_step is {interval}; it must be at least 1")
    mixture = Mixture(
        num_experts=_num_experts(json, 128),
        num_chosen=int(json.get("num_experts_per_tok", 8)),
        intermediate_size=int(json.get("moe_intermediate_size", 768)),
        renormalise=bool(json.get("norm_topk_prob", False)),
        names=MixtureNames("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"),
    )
    dense = {int(number) for number in json.get("mlp_only_layers") or ()}
    has_experts = [number not in dense and (number + 1) % interval == 0 for number in range(num_layers)]
    window = _window(json, 4096)
    if window is None:
        json.without_effect("max_window_layers")
    attention_bias = bool(json.get("attention_bias", False))
    return _read(
        json,
        qk_norm=True,
        num_kv_heads=4,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        windows=[window] * num_layers,
        mixtures=[mixture if has else None for has in has_experts],
    )


def _smollm3(json: ReadKeys) -> DecoderConfig:
    """Llama where every fourth layer sees no positions. (Bakouch et al., 2025.)"""
    num_layers = int(json["num_hidden_layers"])
    interval = int(json.get("no_rope_layer_interval", 4))
    rotated = json.get("no_rope_layers")
    if rotated is None:
        rotated = [(number + 1) % interval != 0 for number in range(num_layers)]
    rope = read_rope(json, _head_dim(json), 2_000_000.0)
    window = _window(json, None)
    attention_bias = bool(json.get("attention_bias", False))
    return _read(
        json,
        num_kv_heads=4,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(json.get("mlp_bias", False)),
        tied_embeddings=True,
        ropes=[rope if rotates else None for rotates in rotated],
        windows=_windows(json, window, [not rotates for rotates in rotated]),
    )


def _phi3(json: ReadKeys) -> DecoderConfig:
    """Fused projections in the checkpoint; often only a part of a head is rotated. (Abdin et al., 2024.)"""
    num_layers = int(json["num_hidden_layers"])
    rope = read_rope(json, _head_dim(json), parts_of_heads=True, original=4096)
    return _read(
        json,
        fused_checkpoint=True,
        eps=1e-5,
        ropes=[rope] * num_layers,
        windows=[json.get("sliding_window")] * num_layers,
    )


def _gemma(json: ReadKeys) -> DecoderConfig:
    """Scaled embeddings, norm weights stored less one, wide heads. (Gemma Team, 2024.)"""
    return _read_gemma(json, "hidden_act", num_kv_heads=16)


def _gemma2(json: ReadKeys) -> DecoderConfig:
    """Norms behind both halves of a layer, soft caps, a window in every other layer. (Gemma Team, 2024.)"""
    slides = [number % 2 == 0 for number in range(int(json["num_hidden_layers"]))]
    window = json.get("sliding_window", 4096)
    json.neutral(sliding_window_size=window)  # its first files have both
    return _read_gemma(
        json,
        num_kv_heads=4,
        post_norms=True,
        attention_scale=json.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=json.get("attn_logit_softcapping", 50.0),
        logit_soft_cap=json.get("final_logit_softcapping", 30.0),
        windows=_windows(json, window, slides),
    )


def _gemma3(json: ReadKeys) -> DecoderConfig:
    """Normalised queries and keys in place of the caps; layers with a window turn faster. (Gemma Team, 2025.)"""
    num_layers, pattern = int(json["num_hidden_layers"]), int(json.get("sliding_window_pattern", 6))
    windows = _windows(
        json, json.get("sliding_window", 4096), [(number + 1) % pattern != 0 for number in range(num_layers)]
    )
    near = _gemma3_rope(json, "sliding_attention", "rope_local_base_freq", 10_000.0)
    far = _gemma3_rope(json, "full_attention", "rope_theta", 1_000_000.0)
    return _read_gemma(
        json,
        num_kv_heads=4,
        qk_norm=True,
        post_norms=True,
        attention_scale=json.get("query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=json.get("final_logit_softcapping"),
        windows=windows,
        ropes=[far if of_layer is None else near for of_layer in windows],
    )


FAMILIES: dict[str, Callable[[ReadKeys], DecoderConfig]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "llama": _llama,
    "mimo": _mimo,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}
"""By the `model_type` of config.json."""


def read_decoder(json: Mapping[str, Any]) -> DecoderConfig:
    """Read the config.json of a native family. What it says is obeyed, or refused by name."""
    keys = ReadKeys(json)
    family = keys["model_type"]
    check_generates(keys)
    config = FAMILIES[family](keys)
    keys.without_effect("architectures")
    check_all_read(keys, family)
    return config


WITH_MTP = ("mimo",)
"""Families whose checkpoints have a layer that `worker_service.models.mtp` reads."""


def _read(
    json: ReadKeys,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    tied_embeddings: bool = False,
    activation: str | None = None,
    ropes: Sequence[Rope | None] | None = None,
    windows: Sequence[int | None] | None = None,
    mixtures: Sequence[Mixture | None] | None = None,
    attention_scale: float | None = None,
    **options: Any,
) -> DecoderConfig:
    """Fields that all families write alike. `num_kv_heads`, `head_dim`, `eps` and `tied_embeddings` are defaults."""
    activation = activation or json.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"the activation '{activation}' is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}"
        )
    num_heads, num_layers = int(json["num_attention_heads"]), int(json["num_hidden_layers"])
    head_dim = _head_dim(json, head_dim)
    if ropes is None:
        ropes = [read_rope(json, head_dim)] * num_layers
    for name, values in (("layers with a window or none", windows), ("layers with positions or none", ropes)):
        if values is not None and len(values) != num_layers:
            raise ValueError(f"it lists {len(values)} {name}, and has {num_layers} layers")
    window_kinds = ["full_attention" if window is None else "sliding_attention" for window in windows or ()]
    json.neutral(layer_types=window_kinds or ["full_attention"] * num_layers)
    if not any(windows or ()) and json.plain.get("use_sliding_window") is False:
        json.without_effect("use_sliding_window", "sliding_window", "max_window_layers")
    return DecoderConfig(
        vocabulary_size=int(json["vocab_size"]),
        hidden_size=int(json["hidden_size"]),
        intermediate_size=int(json["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(json.get("num_key_value_heads", num_kv_heads) or num_heads),
        head_dim=head_dim,
        max_model_len=_max_model_len(json, ropes),
        rms_norm_eps=float(json.get("rms_norm_eps", eps)),
        activation=_ACTIVATIONS[activation],
        layers=tuple(
            LayerConfig(rope, None if window is None else int(window), mixture)
            for rope, window, mixture in zip(
                ropes, windows or [None] * num_layers, mixtures or [None] * num_layers, strict=True
            )
        ),
        tied_embeddings=bool(json.get("tie_word_embeddings", tied_embeddings)),
        attention_scale=head_dim**-0.5 if attention_scale is None else float(attention_scale),
        **options,
    )


def _read_gemma(json: ReadKeys, act_name: str = "hidden_activation", **options: Any) -> DecoderConfig:
    """act_name: the key that counts; a file that has the other one too must say the same there."""
    if json.get("use_bidirectional_attention"):
        raise ValueError("attention to later tokens is not supported")
    activation = json.get(act_name) or "gelu_pytorch_tanh"
    if act_name == "hidden_act" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # which the first files mean
    json.neutral(hidden_act=activation, hidden_activation=activation)
    attention_bias = bool(json.get("attention_bias", False))
    return _read(
        json,
        head_dim=256,
        tied_embeddings=True,
        activation=activation,
        norm_offset=1.0,
        embedding_scale=float(json["hidden_size"]) ** 0.5,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        **options,
    )


def _gemma3_rope(json: ReadKeys, kind: str, theta_name: str, theta: float) -> Rope:
    """Newer files have parameters for each kind of layer; older ones scale those that see everything."""
    older = json.get("rope_scaling") if kind == "full_attention" else None
    newer = (json.get("rope_parameters") or {}).get(kind)
    if older and newer:
        raise ValueError("rope_parameters and rope_scaling are both there")
    parameters = newer or older or ReadKeys({})
    theta = agreed(parameters, "rope_theta", json, theta_name, 2**63) or theta
    return rope_of(parameters, json, _head_dim(json, 256), theta, is_scaled_length=True)


def _max_model_len(json: ReadKeys, ropes: Sequence[Rope | None]) -> int:
    """The longest text that its positions are for, and that none of the other keys for a length rules out."""
    length = int(json["max_position_embeddings"])
    lengths = [length if rope is None else rope.max_positions or length for rope in ropes]
    others = [int(other) for name in _OTHER_LENGTHS if (other := json.get(name)) is not None]
    return min([*lengths, *others], default=length)


def _num_experts(json: ReadKeys, default: int) -> int:
    """Its key has two names."""
    numbers = {int(number) for name in ("num_experts", "num_local_experts") if (number := json.get(name)) is not None}
    if len(numbers) > 1:
        raise ValueError("num_experts and num_local_experts say different numbers")
    return min(numbers, default=default)


def _head_dim(json: ReadKeys, default: int | None = None) -> int:
    return int(json.get("head_dim") or default or int(json["hidden_size"]) // int(json["num_attention_heads"]))


def _window(json: ReadKeys, default: int | None) -> int | None:
    """That of families which have one only if they say so."""
    window, uses = json.get("sliding_window", default), json.get("use_sliding_window")
    return window if uses else None


def _qwen_windows(json: ReadKeys) -> list[int | None]:
    window, first = _window(json, 4096), int(json.get("max_window_layers", 28))
    return _windows(json, window, [number >= first for number in range(int(json["num_hidden_layers"]))])


def _windows(json: ReadKeys, window: int | None, slides: Sequence[bool]) -> list[int | None]:
    """The window in the layers that `layer_types` names, or else in those that `slides`."""
    types = json.get("layer_types")
    if types is not None:
        if unknown := set(types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"layers of type {min(unknown)} are not supported")
        slides = [kind == "sliding_attention" for kind in types]
        if window is None and any(slides):
            raise ValueError("layer_types names layers with a window, and there is none (sliding_window)")
    return [window if slide else None for slide in slides]
