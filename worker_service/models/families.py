"""How the config.json of each native family reads as a `DecoderConfig`: one function a family.

Where a file leaves something out, the family's own default holds, as transformers has it. All raise ValueError,
KeyError or TypeError for a file that describes no such network.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker_service.models.decoder_config import DecoderConfig, LayerConfig
from worker_service.models.rope import read_rope

Json = Mapping[str, Any]

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def _llama(json: Json) -> DecoderConfig:
    """Touvron et al., 2023; SmolLM2 too."""
    attention_bias = bool(json.get("attention_bias", False))
    return _read(json, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=bool(json.get("mlp_bias", False)))


def _mistral(json: Json) -> DecoderConfig:
    """Llama with a sliding window in every layer. (Jiang et al., 2023.)"""
    return _read(json, num_kv_heads=8, windows=[json.get("sliding_window", 4096)] * json["num_hidden_layers"])


def _qwen2(json: Json) -> DecoderConfig:
    """Biases on query, key and value; windows in the layers behind the first ones, if at all. (Yang et al., 2024.)"""
    return _read(json, qkv_bias=True, num_kv_heads=32, windows=_qwen_windows(json))


def _qwen3(json: Json) -> DecoderConfig:
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


def _smollm3(json: Json) -> DecoderConfig:
    """Llama where every fourth layer sees no positions. (Bakouch et al., 2025.)"""
    num_layers = int(json["num_hidden_layers"])
    interval = int(json.get("no_rope_layer_interval", 4))
    rotated = json.get("no_rope_layers")
    if rotated is None:
        rotated = [(number + 1) % interval != 0 for number in range(num_layers)]
    window = json.get("sliding_window") if json.get("use_sliding_window") else None
    attention_bias = bool(json.get("attention_bias", False))
    return _read(
        json,
        num_kv_heads=4,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(json.get("mlp_bias", False)),
        tied_embeddings=True,
        theta=2_000_000.0,
        rotated=rotated,
        windows=_windows(json, window, [not rotates for rotates in rotated]),
    )


def _phi3(json: Json) -> DecoderConfig:
    """Fused projections in the checkpoint; often only a part of a head is rotated. (Abdin et al., 2024.)"""
    return _read(
        json, fused_checkpoint=True, eps=1e-5, windows=[json.get("sliding_window")] * json["num_hidden_layers"]
    )


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}
"""By the `model_type` of config.json."""


def _read(
    json: Json,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    tied_embeddings: bool = False,
    rotated: Sequence[object] | None = None,
    windows: Sequence[int | None] | None = None,
    **options: bool,
) -> DecoderConfig:
    """What all families write alike. `num_kv_heads`, `head_dim`, `eps`, `theta` and `tied_embeddings` are defaults."""
    activation = json.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"the activation '{activation}' is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}"
        )
    hidden_size, num_heads = int(json["hidden_size"]), int(json["num_attention_heads"])
    num_layers, max_positions = int(json["num_hidden_layers"]), int(json["max_position_embeddings"])
    head_dim = int(json.get("head_dim") or head_dim or hidden_size // num_heads)
    rope = read_rope(json, head_dim, theta)
    return DecoderConfig(
        vocabulary_size=int(json["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(json["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(json.get("num_key_value_heads", num_kv_heads) or num_heads),
        head_dim=head_dim,
        max_model_len=min(max_positions, rope.max_positions or max_positions),
        rms_norm_eps=float(json.get("rms_norm_eps", eps)),
        activation=_ACTIVATIONS[activation],
        layers=tuple(
            LayerConfig(rope if rotates else None, None if window is None else int(window))
            for rotates, window in zip(rotated or [True] * num_layers, windows or [None] * num_layers, strict=True)
        ),
        tied_embeddings=bool(json.get("tie_word_embeddings", tied_embeddings)),
        **options,
    )


def _qwen_windows(json: Json) -> list[int | None]:
    window = json.get("sliding_window", 4096) if json.get("use_sliding_window") else None
    first = int(json.get("max_window_layers", 28))
    return _windows(json, window, [number >= first for number in range(int(json["num_hidden_layers"]))])


def _windows(json: Json, window: int | None, slides: Sequence[bool]) -> list[int | None]:
    """The window in the layers that `layer_types` names, or else in those that `slides`."""
    types = json.get("layer_types")
    if types is not None:
        if unknown := set(types) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"layers of type {min(unknown)} are not supported")
        slides = [kind == "sliding_attention" for kind in types]
    return [window if slide else None for slide in slides]
