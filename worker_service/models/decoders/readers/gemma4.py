"""Reads the config.json of Gemma 4's text network. (Gemma Team, 2026.)"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from worker_service.models.config.config_limits import MAX_EXPERTS, SIZES
from worker_service.models.config.rope import Rope, check_truncates, rope_of
from worker_service.models.decoders.decoder_config import (
    DecoderConfig,
    LayerSizes,
    Mixture,
    MixtureNames,
    PerLayerInputs,
)
from worker_service.models.decoders.readers.family_keys import (
    ACTIVATIONS,
    head_dim_of,
    num_layers_of,
    read_layers,
    read_size,
    windows_of,
)
from worker_service.read_keys import ReadKeys

_EXPERTS = MixtureNames("router.proj", "experts", gate="gate_up_proj", up=None, down="down_proj")
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
"""The default of `rope_parameters`."""
_LARGEST = SIZES["head_dim"][1]


def read_gemma4(json: ReadKeys) -> DecoderConfig:
    """Layers may have embeddings of their own, and experts may compute beside the dense network."""
    return _read(json, 512, _per_layer(json), _mixture(json))


def read_gemma4_unified(json: ReadKeys) -> DecoderConfig:
    """Layers have no embeddings of their own, and no experts. Published files say so in the other family's keys."""
    json.neutral(hidden_size_per_layer_input=0, enable_moe_block=False)
    json.without_effect("vocab_size_per_layer_input")
    return _read(json, 1024)


def _read(
    json: ReadKeys, window: int, per_layer: PerLayerInputs | None = None, mixture: Mixture | None = None
) -> DecoderConfig:
    """Gemma 3 whose layers without a window have heads of another size. The last layers may read the keys and values
    of earlier ones. window: the family's default."""
    # Among tokens of images only. Attention of all tokens to later ones, "all", is refused.
    json.choice("use_bidirectional_attention", ("vision",), None, null=None)
    num_layers, local_dim = num_layers_of(json), head_dim_of(json, 256)
    local_heads = read_size(json, "num_key_value_heads", 4)
    slides = [(number + 1) % 6 != 0 for number in range(num_layers)]
    windows = windows_of(json, json.integer("sliding_window", window), slides)
    windows[-1] = None  # as in transformers, whatever the pattern says
    shares_projection = json.boolean("attention_k_eq_v", False)
    global_heads, global_dim = _global_heads(json, windows, (local_heads, local_dim), shares_projection)
    reads = _reads(windows, json.integer("num_kv_shared_layers", 0, least=0, most=num_layers))
    inner, doubles = read_size(json, "intermediate_size"), json.boolean("use_double_wide_mlp", False)
    global_rope, local_rope = _ropes(json, global_dim, local_dim)
    attention_bias = json.boolean("attention_bias", False)
    config = read_layers(
        json,
        num_kv_heads=4,
        head_dim=256,
        tied_embeddings=True,
        activation=json.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        windows=windows,
        ropes=[global_rope if window is None else local_rope for window in windows],
        mixtures=[mixture] * num_layers,
        sizes=[
            LayerSizes(
                global_heads if window is None else local_heads,
                global_dim if window is None else local_dim,
                inner * (2 if doubles and earlier is not None else 1),
            )
            for window, earlier in zip(windows, reads, strict=True)
        ],
        attention_scale=1.0,
        qk_norm="head",
        value_norm=True,
        post_norms=True,
        per_layer=per_layer,
        layer_scales=True,
        causal_without_window=True,
        embedding_scale=float(read_size(json, "hidden_size")) ** 0.5,
        logit_soft_cap=json.number("final_logit_softcapping", None, null=None),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        ignored_tensors=tuple(
            rf"(^|\.)layers\.{number}\.self_attn\.(k_proj|v_proj|k_norm)\."
            for number, earlier in enumerate(reads)
            if earlier is not None
        ),
    )
    layers = tuple(
        replace(layer, reads=earlier, key_is_value=shares_projection and window is None)
        for layer, window, earlier in zip(config.layers, windows, reads, strict=True)
    )
    config = replace(config, layers=layers)
    if not any(windows):  # the cache then has the network's shape
        config = replace(config, num_kv_heads=global_heads, head_dim=global_dim)
    for layer in layers:
        config.of_layer(layer)  # refuses sizes that contradict each other
    return config


def _global_heads(
    json: ReadKeys, windows: Sequence[int | None], local: tuple[int, int], shares_projection: bool
) -> tuple[int, int]:
    """Key-value heads, and elements of a head, of layers without a window. Files of newer programs say them for each
    layer."""
    heads = json.integer("num_global_key_value_heads", None, null=None, most=SIZES["num_key_value_heads"][1])
    dim = json.integer("global_head_dim", 512, most=_LARGEST)
    if json.plain.get("per_layer_config") is None:
        return (heads if shares_projection and heads is not None else local[0]), dim
    by_layer = json.group("per_layer_config")
    names = {int(name): name for name in by_layer if name.isdecimal()}  # transformers writes "05" beside "11"
    found = {True: set[tuple[int, int]](), False: set[tuple[int, int]]()}
    for number, window in enumerate(windows):
        layer = by_layer.group(names.get(number, str(number)))
        own = (
            layer.integer("num_key_value_heads", local[0], most=SIZES["num_key_value_heads"][1]),
            layer.integer("head_dim", local[1], most=_LARGEST),
        )
        found[window is None].add(own)
    if found[False] - {local} or len(found[True]) > 1:
        raise ValueError("per_layer_config gives layers of one kind (layer_types) different heads")
    return found[True].pop()


def _reads(windows: Sequence[int | None], num_reading: int) -> list[int | None]:
    """For each layer, the earlier layer whose keys and values it reads: of the last `num_reading` layers, the last of
    its kind among the others."""
    first = len(windows) - num_reading
    last = {windows[number]: number for number in range(first)}
    if missing := [window for window in windows if window not in last]:
        kind = "full_attention" if missing[0] is None else "sliding_attention"
        raise ValueError(
            f"num_kv_shared_layers is {num_reading}, which leaves no layer of type {kind} with keys of its own"
        )
    return [None if number < first else last[window] for number, window in enumerate(windows)]


def _ropes(json: ReadKeys, global_dim: int, local_dim: int) -> tuple[Rope, Rope]:
    """The positions of layers without a window, and with one."""
    ropes = json.group("rope_parameters")
    if not ropes.plain:
        ropes = ReadKeys(_ROPES)
    kinds = [ropes.group(kind) for kind in _ROPES]
    if not all(kind.plain for kind in kinds):
        raise ValueError("rope_parameters must describe full_attention and sliding_attention")
    return _rope(json, kinds[0], global_dim), _rope(json, kinds[1], local_dim)


def _rope(json: ReadKeys, parameters: ReadKeys, head_dim: int) -> Rope:
    theta = parameters.number("rope_theta", most=2**63)
    check_truncates(parameters.plain)
    if parameters.plain.get("rope_type") != "proportional":
        return rope_of(parameters, json, head_dim, theta)
    parameters.without_effect("rope_type")
    share = parameters.number("partial_rotary_factor", 1.0, least=0, most=1)
    turning = int(share * head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32) / head_dim
    frequencies = torch.zeros(head_dim // 2)  # the pairs are those of whole heads, and the others do not turn
    frequencies[:turning] = 1.0 / theta**exponents
    return Rope(frequencies / parameters.number("factor", 1.0))


def _per_layer(json: ReadKeys) -> PerLayerInputs | None:
    vocabulary = json.integer("vocab_size_per_layer_input", 262_144)
    size = json.integer("hidden_size_per_layer_input", 256, null=0, least=0, most=SIZES["hidden_size"][1])
    if not size:
        return None
    if vocabulary < (needed := read_size(json, "vocab_size")):
        raise ValueError(f"vocab_size_per_layer_input is {vocabulary}; it must be at least vocab_size, {needed}")
    return PerLayerInputs(vocabulary, size)


def _mixture(json: ReadKeys) -> Mixture | None:
    if not json.boolean("enable_moe_block", False):
        json.without_effect("moe_intermediate_size", "num_experts", "top_k_experts")
        return None
    return Mixture(
        num_experts=json.integer("num_experts", most=MAX_EXPERTS),
        num_chosen=json.integer("top_k_experts", most=MAX_EXPERTS),
        intermediate_size=json.integer("moe_intermediate_size", most=SIZES["moe_intermediate_size"][1]),
        renormalise=True,
        names=_EXPERTS,
        beside_dense=True,
    )
