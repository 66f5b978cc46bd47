"""Reads the config.json of an EAGLE-3 head (Li et al., 2025), in two published formats. EAGLE's authors put the layer's
sizes at the top, vLLM's speculators under `transformer_layer_config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_service.models.config.config_keys import check_all_read
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.families import FAMILIES
from worker_service.models.decoders.head_layer import num_state_layers
from worker_service.read_keys import ReadKeys

_FAMILIES = ("llama", "qwen2", "qwen3")
"""Families of a head's layer."""
_FEWEST_LAYERS = 3
_MAX_STATE_LAYERS = 16
"""Cache layers for the state of one token. Published heads need one to four."""
_NEUTRAL: Mapping[str, object] = {
    "eagle_decoder_type": "llama", "has_lm_head": True, "next_layer_regularization": "none", "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
}  # fmt: skip
"""Keys with the only supported value."""
_NOTES = ("embed_requires_grad", "has_no_defaults_at_init", "speculators_config", "speculators_version")
"""Ignored keys: notes on training and purpose."""


@dataclass(frozen=True)
class EagleConfig:
    layer: DecoderConfig
    """A network of one layer, with the target's vocabulary."""
    draft_vocabulary_size: int
    """Tokens with logits; many heads cover the most frequent tokens only."""
    target_hidden_size: int
    states_before: tuple[int, ...]
    """Target layers whose inputs the head uses; num_layers: the last layer's output."""
    norm_before_residual: bool
    """Whether the residual stream begins with the normalised state of the previous token."""

    @classmethod
    def from_json(cls, json: Mapping[str, Any], target: DecoderConfig) -> "EagleConfig":
        """Raises ValueError if the head is unsupported, or made for a target of other sizes."""
        keys = ReadKeys(json)
        keys.choice("speculators_model_type", ("eagle3",), "eagle3")
        if keys.boolean("norm_before_fc", False, null=False):
            raise ValueError("heads with norm_before_fc are not supported")
        sizes = keys.group("transformer_layer_config") if "transformer_layer_config" in keys else keys
        layer = _layer(sizes)
        if sizes is not keys:
            check_all_read(sizes, "of EAGLE-3's heads")
        vocabulary_size = layer.vocabulary_size
        if vocabulary_size != target.vocabulary_size:
            raise ValueError(f"vocab_size is {vocabulary_size}, and the model has {target.vocabulary_size} tokens")
        draft_vocabulary_size = keys.integer(
            "draft_vocab_size", vocabulary_size, null=vocabulary_size, most=vocabulary_size
        )
        size = keys.integer("target_hidden_size", target.hidden_size, null=target.hidden_size)
        if size != target.hidden_size:
            raise ValueError(f"target_hidden_size is {size}, and the model's states have {target.hidden_size} numbers")
        normed = keys.boolean("norm_before_residual", False, null=False)
        states_before = _states_before(keys, target.num_layers)
        keys.without_effect("architectures", "model_type", "transformer_layer_config", *_NOTES)
        for part in (keys, keys.group("eagle_config")):
            part.neutral(**_NEUTRAL)
        check_all_read(keys, "of EAGLE-3's heads")
        return cls(layer, draft_vocabulary_size, target.hidden_size, states_before, normed)


def _layer(sizes: ReadKeys) -> DecoderConfig:
    layer = FAMILIES[sizes.choice("model_type", _FAMILIES, "llama", null="llama")](sizes)
    sizes.without_effect("architectures")
    if layer.num_layers != 1:
        raise ValueError(f"num_hidden_layers is {layer.num_layers}; EAGLE-3's heads have one layer")
    if layer.layers[0].window is not None:
        raise ValueError("heads with a sliding window are not supported")
    if (room := num_state_layers(layer)) > _MAX_STATE_LAYERS:
        raise ValueError(
            f"a state of {layer.hidden_size} numbers needs {room} cache layers, more than {_MAX_STATE_LAYERS}"
        )
    return layer


def _states_before(keys: ReadKeys, num_layers: int) -> tuple[int, ...]:
    """Target layers whose inputs the head uses. SGLang's SpecForge counts layers whose outputs are used
    (`eagle_config`), so that 1 is added."""
    own, name = keys.group("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    if not all(part.boolean("use_aux_hidden_state", True, null=True) for part in (own, keys)):
        raise ValueError("heads with use_aux_hidden_state false, which read one state, are not supported")
    outputs = own.integers(name, 3, least=-1, most=num_layers - 1)
    inputs = keys.integers(name, 3, least=0, most=num_layers)
    if outputs is not None:
        after = tuple(number + 1 for number in outputs)
        if inputs is not None and after != tuple(inputs):
            raise ValueError(f"{name} is {inputs}, and {outputs} within eagle_config, which is {list(after)} here")
        return after
    if inputs is None and num_layers < _FEWEST_LAYERS:
        raise ValueError(f"it has no {name}, whose default needs 3 layers; the model has {num_layers}")
    return tuple(inputs or (2, num_layers // 2, num_layers - 3))
