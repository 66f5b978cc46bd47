"""Refuses invalid values in config.json that transformers accepts or crashes on. transformers checks types only: NaN,
infinity, negative sizes, contradictions and any number of layers pass."""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from math import inf
from typing import Any, TypeGuard

from worker_service.models.config.config_keys import HARMLESS
from worker_service.wording import named, shown

_COUNTED: Mapping[str, int] = {"layer": 512, "block": 512, "expert": 4_096, "head": 1_024, "label": 1 << 16}
"""Maximum of a count, by a word in its key. transformers creates each layer's objects in 10 to 20 ms before any tensor
is read. The deepest published network has 126 layers."""
_MAX_HEADS = 1 << 15
"""Attention heads in all layers. StableLM's code creates two objects for each; the published maximum is 16,128."""
_NO_COUNT = re.compile("dim|epsilon|eps|index|length|size|theta|token|window")
_NO_AMOUNT = re.compile("index|token_id")
_FROM_ONE = ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
                 "type_vocab_size", "vocab_size")  # fmt: skip
_DIVISORS = re.compile(r".*(eps|epsilon|soft_?cap(ping)?|logits_scaling)")
"""Keys above 0: divisors, or terms of a sum under a root."""
_INFINITE = ("time_step_limit",)
"""Keys that may contain infinity. Mamba-2's files say so where nothing is limited."""
_OF_ROPE = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor",
    "mscale", "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta",
    "short_factor",
)  # fmt: skip
"""Numbers, or lists of numbers, whose types transformers does not check."""
_OF_ROPE_AT_TOP = ("partial_rotary_factor", "rope_pct", "rope_percent", "rope_theta", "rotary_emb_base",
                   "rotary_pct")  # fmt: skip


def check_values(json: Mapping[str, Any], config_class: Any) -> None:
    """Raise a ValueError that names the key of an invalid value."""
    defaults = {field.name: field.default for field in fields(config_class)}
    for name, value in _numbers(json):
        if value == inf and name in _INFINITE:
            continue
        if not abs(value) <= sys.float_info.max:  # NaN too, and whole numbers that no float can be
            raise ValueError(f"{named(name)} is {shown(value)}; it must be a finite number")
        if value <= 0 and _DIVISORS.fullmatch(name) and value != defaults.get(name):
            raise ValueError(f"{named(name)} is {value}; it must be above 0, because the network divides by it")
        key = name.rpartition(".")[2]
        for word in (word for word in _COUNTED if word in key and not _NO_COUNT.search(key)):
            if value > _COUNTED[word]:
                raise ValueError(f"{named(name)} is {shown(value)}; it must be at most {_COUNTED[word]}")
    _check_aliases(json, config_class)
    for field in fields(config_class):
        may_be_negative = isinstance(field.default, int | float) and field.default < 0
        for name in (field.name, *(alias for alias, of in config_class.attribute_map.items() if of == field.name)):
            is_negative = _is_number(said := json.get(name)) and said < 0
            if is_negative and not (may_be_negative or name in HARMLESS or _NO_AMOUNT.search(name)):
                raise ValueError(f"{name} is {shown(said)}; it must not be negative")
    _check_positions("", {name: json[name] for name in _OF_ROPE_AT_TOP if name in json}, _OF_ROPE_AT_TOP)
    for name in ("rope_parameters", "rope_scaling"):
        _check_positions(f"{name}.", json.get(name) or {}, _OF_ROPE)
    said = json.get("is_encoder_decoder")  # transformers does not check its type
    if said is not None and not isinstance(said, bool):
        raise ValueError(f"is_encoder_decoder is {shown(said)}; it must be true or false")


def check_sizes(network: Any) -> None:
    """Raise ValueError if a size is not a whole number from 1, or if there are too many heads."""
    for of_layer in network.per_layer_config if network.is_heterogeneous else (network,):
        for name in _FROM_ONE:
            size = getattr(of_layer, name, None)
            if size is not None and not (type(size) is int and size >= 1):
                raise ValueError(f"{name} is {shown(size)}; it must be a whole number from 1 on")
        layers, heads = (getattr(of_layer, name, 1) for name in ("num_hidden_layers", "num_attention_heads"))
        if layers * heads > _MAX_HEADS:
            raise ValueError(f"{layers} layers of {heads} heads are too many: at most {_MAX_HEADS} heads are supported")


def _check_aliases(json: Mapping[str, Any], config_class: Any) -> None:
    """Raise ValueError if a key and its alias differ."""
    for alias, name in config_class.attribute_map.items():
        one, other = json.get(alias), json.get(name)
        if one is not None and other is not None and one != other:
            raise ValueError(f"{alias} is {shown(one)}, and {name}, which means the same, {shown(other)}")


def _check_positions(where: str, parameters: object, names: Collection[str]) -> None:
    """Raise ValueError if a parameter in `names` is no valid number."""
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{where[:-1]} is {shown(parameters)}; it must be an object")
    for name, value in parameters.items():
        if name not in names:
            if isinstance(value, Mapping):  # for one kind of layer
                _check_positions(f"{where}{name}.", value, names)
            continue
        is_list = name in ("long_factor", "short_factor")
        for number in value if is_list and isinstance(value, list) else [value]:
            fits = _is_number(number) and (number > 0 or (number == 0 and "mscale" in name))
            if value is not None and not fits:
                wanted = "a list of numbers" if is_list else "a number"
                raise ValueError(f"{where}{named(name)} is {shown(value)}; it must be {wanted} above 0")


def _numbers(json: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield every number with its key, such as "rope_scaling.factor"."""
    left: list[tuple[str, Any]] = [*json.items()]
    while left:  # a loop: nesting may exceed Python's recursion limit
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{name}.{key}", within) for key, within in value.items()]
        elif isinstance(value, list):
            left += [(name, within) for within in value]
        elif _is_number(value):
            yield name, value


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
