"""Reads the config.json of an EAGLE-3 head (Li et al., 2025), which has two published formats.

The older format, by EAGLE's authors, has the sizes of the head's layer at the top of config.json. The newer format, by
vLLM's project speculators, has the sizes of the head's layer under the key `transformer_layer_config`, and has more
keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_service.models.config.config_keys import check_all_read
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.families import FAMILIES
from worker_service.models.decoders.head_layer import num_state_layers
from worker_service.read_keys import ReadKeys

_FAMILIES = ("llama", "qwen2", "qwen3")
"""Model families to which the layer of a head may belong."""
_FEWEST_LAYERS = 3
_MAX_STATE_LAYERS = 16
"""Maximum number of cache layers in which the state of one token is stored. Published heads need one to four cache
layers for a state."""
_NEUTRAL: Mapping[str, object] = {
    "eagle_decoder_type": "llama", "has_lm_head": True, "next_layer_regularization": "none", "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
}  # fmt: skip
"""Keys that some config.json files of heads contain, each with the only supported value."""
_NOTES = ("embed_requires_grad", "has_no_defaults_at_init", "speculators_config", "speculators_version")
"""Keys about the training and the purpose of a head. These keys are ignored."""


@dataclass(frozen=True)
class EagleConfig:
    """The configuration of an EAGLE-3 head for a target network."""

    layer: DecoderConfig
    """The head's layer, described as a network that has one layer and the target's vocabulary."""
    draft_vocabulary_size: int
    """Number of tokens for which the head computes logits. Many heads compute logits only for the most frequent
    tokens."""
    target_hidden_size: int
    states_before: tuple[int, ...]
    """Numbers of the target's layers whose inputs the head uses. The number num_layers stands for the output of the
    last layer."""
    norm_before_residual: bool
    """Whether the residual stream of the head's layer begins with the normalised state of the previous token."""

    @classmethod
    def from_json(cls, json: Mapping[str, Any], target: DecoderConfig) -> "EagleConfig":
        """Read the config.json of a head. Raises ValueError if the head is not supported, or was made for a target of
        other sizes."""
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
        raise ValueError(f"a state of {layer.hidden_size} numbers takes the place of {room} layers' keys and values")
    return layer


def _states_before(keys: ReadKeys, num_layers: int) -> tuple[int, ...]:
    """Numbers of the target's layers whose inputs the head uses.

    SGLang's SpecForge writes these numbers under the key `eagle_config`. Numbers under `eagle_config` belong to layers
    whose outputs the head uses, so that 1 must be added.
    """
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
        raise ValueError(f"it says no {name}, and the model has {num_layers} layers; there are others from 3 on")
    return tuple(inputs or (2, num_layers // 2, num_layers - 3))
