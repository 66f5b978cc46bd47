"""Tiny random networks of any causal type that transformers knows.

Sizes are found by the names of the fields of a type's configuration class, not by a table of types.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from causal_networks import auto_class_of
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 131
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW, LENGTH = 4, 4, 2, 16, 8, 128
HIDDEN = HEADS * HEAD_DIM

_AT_MOST: Mapping[str, int] = {
    r".*vocab_size.*": VOCABULARY,
    r".*source_positions": 1_500,  # of an encoder that causal networks lack
    r".*(position_embeddings|_positions|n_ctx|seq_len.*|_length|max_len)": LENGTH,
    r".*(rank|landmark.*)": 16,
    r"(num_|n_|)(shared_)experts|n_shared_experts|.*n_groups?|topk_groups?|num_expert_groups?": 1,
    r".*(per_tok(en)?|top_?k|topk_experts|num_selected_experts|num_experts_per_tok.*|topk|moe_k|shared_layers)": 2,
    r".*experts?": 4,
    r".*(kv|key_value).*heads.*|.*heads_kv|.*num_kv": KV_HEADS,
    r".*(heads|n_head|num_head)": HEADS,
    r"qk_head_dim": 2 * HEAD_DIM,
    r"rotary_dim": HEAD_DIM // 2,
    r".*(rope_dim|head_dim|head_size|dim_head|d_kv|kv_channels|head_width)": HEAD_DIM,
    r".*(window|window_size|chunk_size.*|attention_chunk.*)": WINDOW,
    r"(?!.*(size|dim|channels|kernel)).*(layers|n_layer|num_blocks|depth)": LAYERS,
    r".*(intermediate|ffn|ffw|inner|ff_dim|d_ff|mlp|feed_forward).*": 96,
    r".*(hidden_size|d_model|n_embd|embedding_size|width|dim).*": HIDDEN,
}  # fmt: skip
"""The largest number in a tiny network, by a field's name. The first pattern counts."""
_IF_NONE = re.compile(
    "num_key_value_heads|head_dim|n_routed_experts|n_shared_experts|num_experts_per_tok|n_groups?|topk_group"
)
"""Sizes without which some types cannot be built."""
_OTHERS = 256
"""The largest number of any other field that is kept; larger ones become `HIDDEN`."""
_PER_KIND = re.compile(r".*layers?_types?|layers_block_type|block_types?|.*_pattern")


_CONV_LAYERS = ["conv", "full_attention", "conv", "full_attention"]
_MAMBA_LAYERS = ["mamba", "attention", "mamba", "attention"]
_ALSO: Mapping[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_hidden_layers": LAYERS,
            "num_kv_shared_layers": LAYERS,
        }
    },
    "granitemoehybrid": {"layer_types": _MAMBA_LAYERS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": _CONV_LAYERS},
    "lfm2_moe": {"layer_types": _CONV_LAYERS},
    "mamba2": {"expand": 1},
    "zamba": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM},
}
"""Layers of both kinds, where the defaults of a type have one, and sizes that depend on each other."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The defaults of a type, with small sizes. Raises whatever the type's class raises."""
    also = _ALSO.get(model_type, {})
    plain = CONFIG_MAPPING[model_type](**{name: value for name, value in also.items() if isinstance(value, dict)})
    changes = _changes(plain)
    for name, value in also.items():
        changes[name] = changes.get(name, {}) | value if isinstance(value, dict) else value
    if hasattr(plain, "is_decoder"):
        changes["is_decoder"] = True
    if plain.is_encoder_decoder:
        changes["is_encoder_decoder"] = False
    return AutoConfig.for_model(model_type, **changes)


def tiny_network(model_type: str) -> Any:
    """A network with random weights. Raises whatever its code raises."""
    config = tiny_config(model_type)
    torch.manual_seed(0)
    network = auto_class_of(config).from_config(config, attn_implementation="eager").eval()
    randomize(network)
    return network


def randomize(network: torch.nn.Module) -> None:
    """Fresh biases and norms are constant, and fresh weights small, which would hide errors."""
    for name, parameter in network.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.2)


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"t{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, "t0")).save(str(path / "tokenizer.json"))


def _changes(plain: PreTrainedConfig) -> dict[str, Any]:
    """New values of fields with large ones."""
    found: dict[str, Any] = {}
    aliases = set(plain.attribute_map)
    depth = next((value for name in ("num_hidden_layers", "n_layer", "num_layers")
                  if isinstance(value := getattr(plain, name, None), int)), 0)  # fmt: skip
    heads, own = vars(plain).get("num_attention_heads"), {field.name for field in fields(plain)}
    for name, value in vars(plain).items():
        is_by_layer = isinstance(value, list) and depth and len(value) == depth
        if name.startswith("_") or name in aliases or not (name in own or is_by_layer):
            continue
        if isinstance(value, PreTrainedConfig):
            found[name] = _changes(value) | ({"model_type": value.model_type} if value.model_type else {})
        elif isinstance(value, dict) and name.startswith("rope_"):
            if (rope := _rope(value)) != value:
                found[name] = rope
        elif is_by_layer:
            found[name] = _layers(name, value)
        elif value is None and _IF_NONE.fullmatch(name):
            found[name] = _small(name, LENGTH)
        elif name == "num_key_value_heads" and value == heads:
            found[name] = HEADS
        elif (small := _small(name, value)) != value:
            found[name] = small
    if "layer_types" in found and hasattr(plain, "_sliding_window_pattern"):
        found["_sliding_window_pattern"] = len(set(found["layer_types"]))
    return found


def _small(name: str, value: Any) -> Any:
    if name.endswith(("token_id", "token_index", "token_ids")) or name == "eos_token_id":
        return _each(value, lambda number: number if number < VOCABULARY else number % VOCABULARY)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, most in _AT_MOST.items():
        if re.fullmatch(pattern, name):
            return min(value, most)
    return value if value <= _OTHERS else HIDDEN


def _each(value: Any, change: Callable[[int], int]) -> Any:
    if isinstance(value, list):
        return [_each(one, change) for one in value]
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _layers(name: str, values: list[Any]) -> list[Any]:
    """Of each kind of layer one in turn, or the first layers' values."""
    kinds = [*dict.fromkeys(values)] if _PER_KIND.fullmatch(name) else values
    return [_small(name, kinds[layer % len(kinds)]) for layer in range(LAYERS)]


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = _rope(value)
        elif name in ("short_factor", "long_factor"):
            value = value[: HEAD_DIM // 2]
        elif name == "original_max_position_embeddings":
            value = LENGTH // 2
        found[name] = value
    return found
