"""How the config.json of an EAGLE-3 head reads, in the two forms in which heads are published. (Li et al., 2025.)

The older form, of EAGLE's authors, has the sizes of the head's layer at its top. The newer one, of vLLM's speculators,
has them under `transformer_layer_config`, beside what it adds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_service.models.config_keys import check_all_read
from worker_service.models.decoder_config import DecoderConfig
from worker_service.models.families import FAMILIES
from worker_service.models.head_layer import num_state_layers
from worker_service.read_keys import ReadKeys
from worker_service.wording import shown

_FAMILIES = ("llama", "qwen2", "qwen3")
"""Of the head's one layer, which attends and multiplies as theirs do."""
_MOST_STATE_LAYERS = 16
"""Published heads need one to four."""
_NEUTRAL: Mapping[str, object] = {
    "eagle_decoder_type": "llama", "has_lm_head": True, "next_layer_regularization": "none", "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
}  # fmt: skip
"""What a head is like here; some files say it."""
_NOTES = ("embed_requires_grad", "has_no_defaults_at_init", "speculators_config", "speculators_version")
"""How a head was trained, and for what."""


@dataclass(frozen=True)
class EagleConfig:
    """A head for a target."""

    layer: DecoderConfig
    """Of a network of one layer with the target's vocabulary."""
    num_guessable: int
    """Tokens that have a logit: often the most frequent ones alone."""
    target_hidden_size: int
    states_before: tuple[int, ...]
    """The target's layers whose inputs the head reads, as many as the target has for the output of the last one."""
    norm_before_residual: bool
    """Whether what the layer adds to is normalised."""

    @classmethod
    def from_json(cls, json: Mapping[str, Any], target: DecoderConfig) -> "EagleConfig":
        """Raises ValueError, KeyError or TypeError for a file that describes no head for this target."""
        json = ReadKeys(json)
        kind = json.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"heads of type {shown(kind)} are not supported; supported is eagle3")
        if json.get("norm_before_fc"):
            raise ValueError("heads with norm_before_fc are not supported")
        sizes = json.get("transformer_layer_config", json)
        layer = _layer(sizes)
        if sizes is not json:
            check_all_read(sizes, "of EAGLE-3's heads")
        if layer.vocabulary_size != target.vocabulary_size:
            raise ValueError(f"it is for {layer.vocabulary_size} tokens, and the model has {target.vocabulary_size}")
        num_guessable = json.get("draft_vocab_size")
        if num_guessable is None:
            num_guessable = layer.vocabulary_size
        if type(num_guessable) is not int or not 1 <= num_guessable <= layer.vocabulary_size:
            raise ValueError(
                f"draft_vocab_size is {shown(num_guessable)}; it must be a whole number up to {layer.vocabulary_size}"
            )
        if (size := json.get("target_hidden_size")) not in (None, target.hidden_size):
            raise ValueError(f"it reads states of {shown(size)}, and the model's have {target.hidden_size}")
        normed = json.get("norm_before_residual")
        if normed is not None and type(normed) is not bool:
            raise ValueError(f"norm_before_residual is {shown(normed)}; it must be true or false")
        states_before = _states_before(json, target.num_layers)
        json.without_effect("architectures", "model_type", "transformer_layer_config", *_NOTES)
        for part in (json, json.get("eagle_config") or ReadKeys({})):
            part.neutral(**_NEUTRAL)
        check_all_read(json, "of EAGLE-3's heads")
        return cls(layer, num_guessable, target.hidden_size, states_before, bool(normed))


def _layer(sizes: ReadKeys) -> DecoderConfig:
    if (family := sizes.get("model_type") or "llama") not in _FAMILIES:
        raise ValueError(f"a layer of {shown(family)} is not supported; supported are {', '.join(_FAMILIES)}")
    layer = FAMILIES[family](sizes)
    sizes.without_effect("architectures")
    if layer.num_layers != 1:
        raise ValueError(f"heads of {layer.num_layers} layers are not supported; EAGLE-3's have one")
    if layer.layers[0].window is not None:
        raise ValueError("heads with a sliding window are not supported")
    if (room := num_state_layers(layer)) > _MOST_STATE_LAYERS:
        raise ValueError(f"a state of {layer.hidden_size} numbers takes the place of {room} layers' keys and values")
    return layer


def _states_before(json: ReadKeys, num_layers: int) -> tuple[int, ...]:
    """Where the numbers have a part of their own, they are of layers whose outputs are read (SGLang's SpecForge)."""
    own = json.get("eagle_config") or ReadKeys({})
    if own.get("use_aux_hidden_state") is False or json.get("use_aux_hidden_state") is False:
        raise ValueError("heads with use_aux_hidden_state false, which read one state, are not supported")
    name = "eagle_aux_hidden_state_layer_ids"
    further = own.get(name) is not None
    numbers = own.get(name) if further else json.get(name)
    if numbers is None:
        numbers = [2, num_layers // 2, num_layers - 3]
    if (
        not isinstance(numbers, list)
        or len(numbers) != 3
        or not all(type(number) is int and 0 <= number + further <= num_layers for number in numbers)
    ):
        raise ValueError(f"it reads the states of layers {shown(numbers)}; the model has {num_layers}")
    return tuple(number + further for number in numbers)
