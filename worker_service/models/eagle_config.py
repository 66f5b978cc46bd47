"""How the config.json of an EAGLE-3 head reads, in the two forms in which heads are published. (Li et al., 2025.)

The older form, of EAGLE's authors, has the sizes of the head's layer at its top. The newer one, of vLLM's speculators,
has them under `transformer_layer_config`, beside what it adds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_service.models.decoder_config import DecoderConfig
from worker_service.models.families import FAMILIES

_FAMILIES = ("llama", "qwen2", "qwen3")
"""Of the head's one layer, which attends and multiplies as theirs do."""


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
        kind = json.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"heads of type '{kind}' are not supported; supported is eagle3")
        if json.get("norm_before_fc"):
            raise ValueError("heads with norm_before_fc are not supported")
        sizes = json.get("transformer_layer_config", json)
        family = sizes.get("model_type", "llama")
        if family not in _FAMILIES:
            raise ValueError(f"a layer of '{family}' is not supported; supported are {', '.join(_FAMILIES)}")
        layer = FAMILIES[family](sizes)
        if layer.num_layers != 1:
            raise ValueError(f"heads of {layer.num_layers} layers are not supported; EAGLE-3's have one")
        if layer.layers[0].window is not None:
            raise ValueError("heads with a sliding window are not supported")
        if layer.vocabulary_size != target.vocabulary_size:
            raise ValueError(f"it is for {layer.vocabulary_size} tokens, and the model has {target.vocabulary_size}")
        num_guessable = int(json.get("draft_vocab_size") or layer.vocabulary_size)
        if not 1 <= num_guessable <= layer.vocabulary_size:
            raise ValueError(f"draft_vocab_size is {num_guessable}, and there are {layer.vocabulary_size} tokens")
        target_hidden_size = int(json.get("target_hidden_size") or target.hidden_size)
        if target_hidden_size != target.hidden_size:
            raise ValueError(f"it reads states of {target_hidden_size}, and the model's have {target.hidden_size}")
        options = json.get("eagle_config") or json
        if options.get("use_aux_hidden_state") is False:
            raise ValueError("heads with use_aux_hidden_state false, which read one state, are not supported")
        states_before = options.get("eagle_aux_hidden_state_layer_ids")
        if states_before is None:
            states_before = [2, target.num_layers // 2, target.num_layers - 3]
        if len(states_before) != 3 or not all(
            type(number) is int and 0 <= number <= target.num_layers for number in states_before
        ):
            raise ValueError(f"it reads the states before layers {states_before}; the model has {target.num_layers}")
        return cls(
            layer,
            num_guessable,
            target_hidden_size,
            tuple(states_before),
            bool(json.get("norm_before_residual", False)),
        )
