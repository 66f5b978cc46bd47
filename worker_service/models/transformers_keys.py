"""Which keys of a config.json transformers' code knows, and the refusal of others.

transformers keeps any key that a file has, whether its code reads it or not.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from worker_service.models.config_keys import check_all_read
from worker_service.models.rope import NOTES, ROPE_KEYS
from worker_service.read_keys import ReadKeys

_REPEATED = {"activation_function": "hidden_act", "layer_norm_eps": "norm_eps", "n_ctx": "max_position_embeddings"}
"""Keys of older code, each with the one whose value it must have."""
_NEUTRAL: Mapping[str, object] = {
    "attention_softmax_in_fp32": True, "mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True,
    "scale_attention_softmax_in_fp32": True,
}  # fmt: skip
"""What StarCoder 2's files say beside what its code reads, which is as they say."""


def check_known(json: Mapping[str, Any], network: Any, network_class: Any) -> None:
    """Raise ValueError where a file has a key that is neither the configuration's, nor read by the network's code, nor
    one that changes nothing. network: the file as `parse` reads it."""
    keys = ReadKeys(json)
    said = [name for name, value in json.items() if value is not None]
    known = {field.name for field in fields(network)} | type(network).attribute_map.keys() | {"architectures"}
    # What its class takes without having it as a field does not become an attribute, or is one in any case.
    plain = type(network)()
    taken = {name for name in said if not hasattr(network, name) or hasattr(plain, name)}
    known |= {name for name in taken if not name.startswith("_")}  # those are handed to no class
    code = inspect.getsource(sys.modules[network_class.__module__])
    own = inspect.getsource(sys.modules[type(network).__module__])
    known |= {name for name in said if re.search(rf"""config(\.|, "){re.escape(name)}\b""", code) or f'"{name}"' in own}
    keys.without_effect("model_type", *known)
    keys.neutral(**_NEUTRAL, **{name: getattr(network, other, None) for name, other in _REPEATED.items()})
    check_all_read(keys, network.model_type)
    for parameters in rope_parameters_of(network):
        _check_rope(ReadKeys(parameters), network.model_type, code)


def rope_parameters_of(network: Any) -> list[Mapping[str, Any]]:
    """Those of all layers, or of each kind of layer."""
    parameters = getattr(network, "rope_parameters", None) or {}
    nested = [one for one in parameters.values() if isinstance(one, Mapping)]
    return nested or ([parameters] if parameters else [])


def _check_rope(parameters: ReadKeys, family: str, code: str) -> None:
    kind = parameters.get("rope_type")
    parameters.without_effect(*(name for name in parameters if f'rope_parameters["{name}"]' in code))
    parameters.without_effect("type", "rope_theta", "partial_rotary_factor", *NOTES, *ROPE_KEYS.get(str(kind), ()))
    parameters.without_effect("original_max_position_embeddings")  # beside other kinds it says nothing
    check_all_read(parameters, f"{family} with positions of type {kind}")
