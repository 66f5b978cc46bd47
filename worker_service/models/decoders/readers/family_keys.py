"""Keys of config.json that all native families read."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch

from worker_service.models.config.config_limits import SIZES
from worker_service.models.config.rope import Rope, check_truncates, read_rope, read_theta, rope_of
from worker_service.models.decoders.decoder_config import (
    DecoderConfig,
    Latent,
    LayerConfig,
    LayerSizes,
    Mixture,
    Temperature,
)
from worker_service.models.layers.mixers import Mixer
from worker_service.read_keys import REFUSED, ReadKeys

_OTHER_LENGTHS = ("max_seq_len", "max_seq_length", "max_sequence_length", "seq_len", "seq_length")
_LARGEST_STEP = torch.finfo(torch.float32).max
_KINDS = ("full_attention", "sliding_attention")
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_layers(
    json: ReadKeys,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    eps_name: str = "rms_norm_eps",
    tied_embeddings: bool = False,
    activation: str | None = None,
    intermediate_size: int | None = None,
    num_layers: int | None = None,
    ropes: Sequence[Rope | None] | None = None,
    windows: Sequence[int | None] | None = None,
    mixtures: Sequence[Mixture | None] | None = None,
    mixers: Sequence[Mixer | None] | None = None,
    sizes: Sequence[LayerSizes | None] | None = None,
    attention_scale: float | None = None,
    latent: Latent | None = None,
    **options: Any,
) -> DecoderConfig:
    """Read the keys of all families. num_kv_heads, head_dim, eps, tied_embeddings: the family's defaults. With `latent`
    the caller gives `ropes`. With `intermediate_size`, `num_layers` or `mixers`, the caller has read
    `intermediate_size`, `num_hidden_layers` or `layer_types`."""
    if activation is None:
        activation = json.choice("hidden_act", ACTIVATIONS, "silu")
    num_heads, num_layers = read_size(json, "num_attention_heads"), num_layers or num_layers_of(json)
    if latent is None:
        head_dim = head_dim_of(json, head_dim)
        num_kv_heads = read_size(json, "num_key_value_heads", num_kv_heads or num_heads, null=num_heads)
    else:
        json.neutral(head_dim=latent.rotary_dim, qk_head_dim=latent.query_dim, num_key_value_heads=num_heads)
        head_dim, num_kv_heads = latent.key_dim, 1
    if ropes is None:
        ropes = [read_rope(json, head_dim)] * num_layers
    window_kinds = ["full_attention" if window is None else "sliding_attention" for window in windows or ()]
    if mixers is None:
        json.neutral(layer_types=window_kinds or ["full_attention"] * num_layers)
    if not any(windows or ()) and json.plain.get("use_sliding_window") is False:
        json.without_effect("use_sliding_window", "sliding_window", "max_window_layers")
    return DecoderConfig(
        vocabulary_size=read_size(json, "vocab_size"),
        hidden_size=read_size(json, "hidden_size"),
        intermediate_size=read_size(json, "intermediate_size") if intermediate_size is None else intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=_max_model_len(json, ropes),
        rms_norm_eps=float(json.number(eps_name, eps)),
        activation=ACTIVATIONS.get(activation, activation),
        layers=tuple(
            LayerConfig(rope, window, mixture, mixer, sizes=own)
            for rope, window, mixture, mixer, own in zip(
                ropes,
                windows or [None] * num_layers,
                mixtures or [None] * num_layers,
                mixers or [None] * num_layers,
                sizes or [None] * num_layers,
                strict=True,
            )
        ),
        tied_embeddings=json.boolean("tie_word_embeddings", tied_embeddings),
        attention_scale=head_dim**-0.5 if attention_scale is None else attention_scale,
        latent=latent,
        **options,
    )


def _max_model_len(json: ReadKeys, ropes: Sequence[Rope | None]) -> int:
    """The least of config.json's maximum and those of the rotary embeddings."""
    length = read_size(json, "max_position_embeddings")
    lengths = [length if rope is None else rope.max_positions or length for rope in ropes]
    others = [other for name in _OTHER_LENGTHS if (other := json.integer(name, None, null=None)) is not None]
    return min([*lengths, *others])


def read_size(json: ReadKeys, name: str, default: int = REFUSED, *, null: int = REFUSED) -> int:
    """Read a size from 1 to its maximum in `SIZES`."""
    return json.integer(name, default, null=null, most=SIZES[name][1])


def num_layers_of(json: ReadKeys) -> int:
    return read_size(json, "num_hidden_layers")


def head_dim_of(json: ReadKeys, default: int | None = None) -> int:
    hidden_size, num_heads = read_size(json, "hidden_size"), read_size(json, "num_attention_heads")
    default = default or hidden_size // num_heads
    found = read_size(json, "head_dim", default, null=default)
    if found < 1:
        raise ValueError(f"hidden_size is {hidden_size}; it must be at least num_attention_heads, which is {num_heads}")
    return found


def rope_of_kind(
    json: ReadKeys, kind: str, head_dim: int, theta: float, theta_name: str = "rope_theta", *,
    is_scaled_length: bool = False,
) -> Rope:  # fmt: skip
    """The rotary embeddings of layers with "full" or "sliding" attention. Older files scale only those with full
    attention. theta: the family's default; theta_name: its key at the top. is_scaled_length: see `rope_of`."""
    older = json.group("rope_scaling") if kind == "full" else ReadKeys({})
    newer = json.group("rope_parameters").group(f"{kind}_attention")
    if older.plain and newer.plain:
        raise ValueError("rope_parameters and rope_scaling are both there")
    parameters = newer if newer.plain else older
    check_truncates(parameters.plain)
    theta = read_theta(parameters, json, theta_name, theta)
    return rope_of(parameters, json, head_dim, theta, is_scaled_length=is_scaled_length)


def check_step_limits(json: ReadKeys) -> None:
    """Mark `time_step_limit` of Mamba-2 as read if it limits no float32 number. transformers applies it to prompts
    only."""
    limits = json.plain.get("time_step_limit")
    if isinstance(limits, list) and len(limits) == 2 and limits[0] == 0:
        most = inf if limits[1] == {"__float__": "Infinity"} else limits[1]
        if isinstance(most, int | float) and most >= _LARGEST_STEP:
            json.without_effect("time_step_limit")


def rope_parameters(json: ReadKeys, default: Mapping[str, Any] | None) -> ReadKeys:
    """The parameters that `read_rope` reads. default: see there."""
    if (older := json.group("rope_scaling")).plain:
        return older
    if default is not None and json.plain.get("rope_parameters") is None:
        return ReadKeys(default)
    return json.group("rope_parameters")


def mistral_rope(*, theta: float, factor: float, length: int) -> dict[str, Any]:
    """The default `rope_parameters` of Mistral's families. length: the longest text of the first training."""
    return {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": length,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip


def read_temperature(json: ReadKeys, parameters: ReadKeys) -> Temperature | None:
    """The factors on queries of Mistral's families. parameters: those of the rotary embeddings."""
    growth = parameters.number("llama_4_scaling_beta", None, null=None, least=0)
    if not growth:
        return None
    name = "original_max_position_embeddings"
    steps = (keys.integer(name, None, null=None) for keys in (parameters, json))
    if (step := next(filter(None, steps), None)) is None:
        raise ValueError(f"llama_4_scaling_beta is in the rotary parameters without {name}, which it needs")
    return Temperature(step, float(growth), first=0)


def num_experts_of(json: ReadKeys, default: int) -> int:
    names = ("num_experts", "num_local_experts")
    numbers = {read_size(json, name) for name in names if name in json}
    if len(numbers) > 1:
        raise ValueError("num_experts and num_local_experts say different numbers")
    return min(numbers, default=default)


def window_of(json: ReadKeys, default: int | None) -> int | None:
    """The window of families whose layers have one only if `use_sliding_window` is true."""
    window, uses = json.integer("sliding_window", default, null=None), json.boolean("use_sliding_window", False)
    return window if uses else None


def read_qwen_windows(json: ReadKeys, first: int = 28) -> list[int | None]:
    """first: the family's default of the first layer with a window."""
    window, first = window_of(json, 4096), json.integer("max_window_layers", first, least=0)
    return windows_of(json, window, [number >= first for number in range(num_layers_of(json))])


def windows_of(json: ReadKeys, window: int | None, slides: Sequence[bool]) -> list[int | None]:
    """Each layer's window. slides: layers with a window if config.json has no `layer_types`."""
    types = json.choices("layer_types", _KINDS, len(slides))
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
        if window is None and any(slides):
            raise ValueError("layer_types names layers with a window, and there is none (sliding_window)")
    return [window if slide else None for slide in slides]
