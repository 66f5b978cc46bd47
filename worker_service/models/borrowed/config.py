"""Reads the config.json of a network that runs in transformers' code. Errors give the reason."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from worker_service.models.borrowed.states import has_states
from worker_service.models.borrowed.survey import ATTENTION, Survey, survey
from worker_service.models.causal_model import widest
from worker_service.models.config.config_keys import check_generates
from worker_service.models.config.rope import scaled_length
from worker_service.models.config.text_part import WHOLES
from worker_service.models.config.transformers_json import parse
from worker_service.models.config.transformers_keys import check_known, rope_parameters_of
from worker_service.models.layer_needs import LayerNeeds

_LENGTHS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")
"""Names of the maximum sequence length; the first that is stated counts."""
_WITH_STATES = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mlp", "moe"}
"""Types of layers with states, or without attention beside them."""
_LONGEST_STATES = 2**20
"""The maximum sequence length of a network without attention that states none."""
_WITHOUT_LIMIT = 2_048
"""The maximum sequence length of a network with ALiBi that states none. BLOOM was trained with it."""


@dataclass(frozen=True)
class TransformersConfig:
    network: Any
    """transformers' configuration object."""
    network_class: Any
    needs: Survey
    vocabulary_size: int
    max_model_len: int
    own_tensors: frozenset[str] = frozenset()
    """Tied tensors with separate values in the checkpoint."""
    kv_parts = 2

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> "TransformersConfig":
        """Raises ValueError if the network is not supported."""
        try:
            return cls._read(json)
        except RuntimeError as error:  # transformers': `per_layer_config` has a key that is read for all layers
            why = str(error).partition(". ")[0]
            raise ValueError(f"a model {json['model_type']} is not supported: {why}") from error

    @classmethod
    def _read(cls, json: Mapping[str, Any]) -> "TransformersConfig":
        network = parse(json)
        network_class = AutoModelForCausalLM._model_mapping.get(type(network), None)
        text = network.get_text_config(decoder=True)
        if text is not network and network_class is not None and network_class.config_class is type(text):
            # A class for the text alone; files have all parts (Llama 4).
            network_class = AutoModelForImageTextToText._model_mapping.get(type(network), None)
        if (reason := _why_not(network, network_class)) is not None:
            raise ValueError(f"a model {network.model_type} is not supported: {reason}")
        body = AutoModel._model_mapping.get(type(network), network_class)
        check_generates(json, network_class.__name__, body.__name__)
        check_known(json, network, network_class)
        if text is not network:
            check_known(_inner(json, network, text), text, network_class)
        try:
            needs = survey(network_class, network)
        except ValueError as error:
            raise ValueError(f"a model {network.model_type} is not supported: {error}") from error
        _check_rotary_dims(text, needs)
        return cls(
            network=network,
            network_class=network_class,
            needs=needs,
            vocabulary_size=int(text.vocab_size),
            max_model_len=min(_lengths(text, needs)),
        )

    @property
    def tied(self) -> Mapping[str, str]:
        return {name: other for name, other in self.needs.tied.items() if name not in self.own_tensors}

    def untied(self, own: frozenset[str]) -> "TransformersConfig":
        return replace(self, own_tensors=own)

    def ignoring(self, names: Collection[str]) -> "TransformersConfig":
        """names: patterns of tensors that this network does not use."""
        ignored = (*self.needs.ignored_tensors, *names)
        return replace(self, needs=replace(self.needs, ignored_tensors=ignored))

    @property
    def ignored_tensors(self) -> Collection[str]:
        return self.needs.ignored_tensors

    @property
    def hidden_size(self) -> int:
        return self.needs.hidden_size

    @property
    def layer_needs(self) -> tuple[LayerNeeds, ...]:
        return (*self.needs.keys, *self.needs.states)

    @property
    def num_layers(self) -> int:
        return len(self.layer_needs)

    @property
    def num_kv_heads(self) -> int:
        return self.needs.keys[0].num_kv_heads if self.needs.keys else 0

    @property
    def head_dim(self) -> int:
        """Elements of a head's key; values have as many."""
        return self.needs.keys[0].head_dim if self.needs.keys else 0

    @property
    def sliding_window(self) -> int | None:
        return widest(self.windows) if self.windows else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.needs.keys)


def _why_not(network: Any, network_class: Any) -> str | None:
    """Why a network with this configuration cannot run, or None."""
    if network.is_encoder_decoder:
        return "supported encoder-decoders are bart, t5 and whisper"
    if network_class is None:
        if network.model_type in WHOLES:
            return "its text_config is missing, or its architectures are of another network"
        if network.get_text_config(decoder=True) is not network:
            return "it reads images or sounds, and the text network of its type cannot be loaded alone"
        return "transformers' AutoModelForCausalLM has no network of this type"
    if "shared_kv_states" in signature(network_class.forward).parameters:
        return "it drafts for another network, whose keys and values it reads"
    if network.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(network, "is_decoder", None) is False:
        return "it is made to fill gaps in text (is_decoder is false)"
    text, stateful = network.get_text_config(decoder=True), has_states(network_class)
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENTION
    if kinds - _WITH_STATES:
        return f"it has layers of type {min(kinds - _WITH_STATES)}"
    if network_class._is_stateful and not stateful:
        return "it keeps states of a kind that is not supported"
    if kinds and not stateful:
        return f"it has layers of type {min(kinds)}"
    for name in ("num_hidden_layers", "vocab_size"):
        if not isinstance(getattr(text, name, None), int):
            return f"its {name} is not stated"
    return None


def _inner(json: Mapping[str, Any], network: Any, text: Any) -> Mapping[str, Any]:
    """The part of config.json that describes `text`."""
    for name in network.sub_configs:
        if getattr(network, name, None) is text:
            found: Mapping[str, Any] = json.get(name) or {}
            return found
    raise ValueError(f"a model {network.model_type} is not supported: its configuration of text is nested twice")


def _check_rotary_dims(network: Any, needs: Survey) -> None:
    """Raise ValueError if the network's code rotates other parts of heads than config.json states."""
    if not needs.keys:
        return
    kinds, rope = getattr(network, "layer_types", None) or (), getattr(network, "rope_parameters", None) or {}
    unused = [rope[kind] for kind in ("full_attention", "sliding_attention") if kind in rope and kind not in kinds]
    for parameters in rope_parameters_of(network):
        if parameters in unused:
            continue
        kind = parameters.get("rope_type", "default")
        if kind != "default" and not needs.rotary_dims:
            raise ValueError(
                f"its rotary embeddings are of type {kind}, but the code of {network.model_type} rotates no heads"
            )
        share = parameters.get("partial_rotary_factor")
        if share is None or kind == "proportional":  # transformers' code turns the other elements by 0
            continue
        # Elements are rotated in pairs.
        if not needs.rotary_dims & {2 * len(range(0, int(layer.head_dim * share), 2)) for layer in needs.keys}:
            raise ValueError(
                f"partial_rotary_factor is {share}, and the code of {network.model_type} rotates other parts of a head"
            )


def _lengths(network: Any, needs: Survey) -> Iterator[int]:
    """Yield the maximum sequence length of each rotary embedding. Raises ValueError."""
    stated = (getattr(network, name, None) for name in _LENGTHS)
    length = next((length for length in stated if isinstance(length, int)), None)
    if length is None and (needs.has_slopes or not needs.keys):
        length = _WITHOUT_LIMIT if needs.keys else _LONGEST_STATES
    if length is None:
        raise ValueError(f"a model {network.model_type} is not supported: its max_position_embeddings is not stated")
    for parameters in rope_parameters_of(network) or [{}]:
        yield scaled_length(parameters.get("rope_type", "default"), parameters, length) - needs.first_position
