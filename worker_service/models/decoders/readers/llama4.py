"""Reads the config.json of Llama 4's text network. (Meta AI, 2025.)"""

from collections.abc import Sequence
from dataclasses import replace

from kernels.linear.experts import Routing
from worker_service.models.config.config_limits import MAX_LAYERS
from worker_service.models.config.rope import Rope, read_rope
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture, MixtureNames, Temperature
from worker_service.models.decoders.readers.family_keys import head_dim_of, num_layers_of, read_layers, read_size
from worker_service.read_keys import ReadKeys

_KINDS = ("chunked_attention", "full_attention")
_NAMES = MixtureNames("feed_forward.router", "feed_forward.experts", gate="gate_up_proj", up=None, down="down_proj")


def read_llama4(json: ReadKeys) -> DecoderConfig:
    """Attention within chunks in layers with rotary embeddings, and a temperature by position in the others. Experts
    beside a shared one, of which the router's weight multiplies the input."""
    num_layers = num_layers_of(json)
    rotated = _rotated(json, num_layers)
    kinds = json.choices("layer_types", _KINDS, num_layers)
    chunked = rotated if kinds is None else [kind == "chunked_attention" for kind in kinds]
    chunk = json.integer("attention_chunk_size", 8192, null=None)
    if chunk is None and any(chunked):
        raise ValueError("attention_chunk_size is null, and there are layers whose attention is chunked")
    temperature = None
    # In Meta's first files, the key is 4, which means true.
    if json.plain.get("attn_temperature_tuning") == 4 or json.boolean("attn_temperature_tuning", True):
        json.without_effect("attn_temperature_tuning")
        temperature = Temperature(json.integer("floor_scale", 8192), float(json.number("attn_scale", 0.1)))
    else:
        json.without_effect("attn_scale", "floor_scale")
    normalises, attention_bias = json.boolean("use_qk_norm", True), json.boolean("attention_bias", False)
    with_experts = json.integers("moe_layers", least=0, most=MAX_LAYERS)
    step = json.integer("interleave_moe_layer_step", 1, least=1 if with_experts is None else 0)
    if with_experts is None:
        with_experts = [number for number in range(num_layers) if (number + 1) % step == 0]
    json.neutral(for_llm_compressor=False)
    rope, mixture = _rope(json, normalises), _mixture(json) if with_experts else None
    if mixture is None:  # files of networks without experts say 0
        json.without_effect("intermediate_size", "num_experts_per_tok", "num_local_experts")
    config = read_layers(
        json,
        num_kv_heads=8,
        head_dim=128,
        eps=1e-5,
        intermediate_size=read_size(json, "intermediate_size_mlp", 16_384),
        ropes=[rope if rotates else None for rotates in rotated],
        windows=[chunk if is_chunked else None for is_chunked in chunked],
        mixtures=[mixture if number in with_experts else None for number in range(num_layers)],
        qk_norm="plain" if normalises else None,
        interleaved=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        renamed=(("mlp.shared_experts", "feed_forward.shared_expert"), ("mlp", "feed_forward")),
        ignored_tensors=(r"^(vision_model|multi_modal_projector)\.",),
    )
    layers = (
        replace(layer, chunked=is_chunked, temperature=None if rotates else temperature)
        for layer, is_chunked, rotates in zip(config.layers, chunked, rotated, strict=True)
    )
    return replace(config, layers=tuple(layers))


def _rotated(json: ReadKeys, num_layers: int) -> Sequence[bool]:
    """Whether each layer has rotary embeddings: no_rope_layers has a 1 for layers that do."""
    interval = json.integer("no_rope_layer_interval", 4)
    listed = json.integers("no_rope_layers", least=0, most=1)
    if not listed:
        return [(number + 1) % interval != 0 for number in range(num_layers)]
    if len(listed) < num_layers:
        raise ValueError(f"no_rope_layers has {len(listed)} numbers; it must have one for each of {num_layers} layers")
    return [number == 1 for number in listed[:num_layers]]


def _rope(json: ReadKeys, normalises: bool) -> Rope:
    rope = read_rope(json, head_dim_of(json, 128), 500_000.0)
    if normalises and rope.scale != 1:
        # Llama 4 normalises after it rotates. Both orders are equal if rotating changes no length.
        raise ValueError(
            f"the rotary embeddings scale queries and keys by {rope.scale:g}, which use_qk_norm would undo; that is "
            "not supported"
        )
    return rope


def _mixture(json: ReadKeys) -> Mixture:
    num_experts = read_size(json, "num_local_experts", 16)
    num_chosen = read_size(json, "num_experts_per_tok", 1)
    size = read_size(json, "intermediate_size", 8192)
    routing = Routing(num_experts, num_chosen, is_sigmoid=True, renormalise=False, scale=1.0, has_bias=False)
    return Mixture(
        num_experts, num_chosen, size, renormalise=False, names=_NAMES, routing=routing, shared_size=size,
        scales_inputs=True,
    )  # fmt: skip
