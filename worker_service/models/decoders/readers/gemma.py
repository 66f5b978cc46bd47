"""Reads the config.json of Gemma 1 to 3. (Gemma Team, 2024 and 2025.)"""

from functools import partial
from typing import Any

from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.readers.family_keys import (
    ACTIVATIONS,
    head_dim_of,
    num_layers_of,
    read_layers,
    read_size,
    rope_of_kind,
    windows_of,
)
from worker_service.read_keys import ReadKeys


def read_gemma(json: ReadKeys) -> DecoderConfig:
    """Llama with scaled embeddings, larger heads, and norm weights stored minus 1. (Gemma Team, 2024.)"""
    return _read_gemma(json, "hidden_act", num_kv_heads=16)


def read_gemma2(json: ReadKeys) -> DecoderConfig:
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
        windows=windows_of(json, window, slides),
    )


def read_gemma3(json: ReadKeys) -> DecoderConfig:
    """Gemma 2 with normalised queries and keys in place of soft caps, and a smaller `rope_theta` in layers with a
    window. (Gemma Team, 2025.)"""
    num_layers, pattern = num_layers_of(json), json.integer("sliding_window_pattern", 6)
    window = json.integer("sliding_window", 4096, null=None)
    windows = windows_of(json, window, [(number + 1) % pattern != 0 for number in range(num_layers)])
    rope = partial(rope_of_kind, json, head_dim=head_dim_of(json, 256), is_scaled_length=True)
    near = rope("sliding", theta=10_000.0, theta_name="rope_local_base_freq")
    far = rope("full", theta=1_000_000.0)
    return _read_gemma(
        json,
        num_kv_heads=4,
        qk_norm="head",
        post_norms=True,
        attention_scale=json.integer("query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=json.number("final_logit_softcapping", None, null=None),
        windows=windows,
        ropes=[far if of_layer is None else near for of_layer in windows],
    )


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
