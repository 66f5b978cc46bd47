"""Parses a config.json with transformers. Only this module passes a config.json to transformers."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from worker_service.models.config.config_keys import BOOKKEEPING, CODE, EXECUTION, HARMLESS
from worker_service.models.config.transformers_values import check_sizes, check_values
from worker_service.wording import named

# The service has its own log.
logging.set_verbosity_error()
logging.disable_progress_bar()

PROPERTIES = frozenset({"model_type", "num_labels", "per_layer_config", "rope_scaling"})
"""Keys that all configuration classes accept without a field."""
_INFINITIES = ({"__float__": "Infinity"}, {"__float__": "-Infinity"})


def parse(json: Mapping[str, Any]) -> Any:
    """Parse a supported family's config.json. Raises ValueError."""
    family = json.get("model_type", "of no stated type")
    if family not in CONFIG_MAPPING:
        raise ValueError(f"a model {family} is not supported: transformers does not know it")
    config_class = CONFIG_MAPPING[family]
    check_values(json, config_class)
    own = {field.name for field in fields(config_class)} | PROPERTIES
    # In Kimi Linear, `model_max_length` is another name of `max_position_embeddings`.
    unwanted = (BOOKKEEPING | CODE | EXECUTION) - {*config_class.attribute_map.values()}
    wanted = {
        name: _with_infinities(value)
        for name, value in json.items()
        # These keys could make transformers load code or read other files.
        if name not in unwanted
        # Others would overwrite a method or a private attribute.
        and (name in own or not (name.startswith("_") or hasattr(config_class, name)) or _takes(config_class, name))
        # transformers warns about a null rope_scaling, and a null alias would overwrite its key.
        and not (value is None and (name == "rope_scaling" or name in config_class.attribute_map))
    }
    try:
        network = AutoConfig.for_model(**wanted)
    except Exception as error:
        # A value that the class does not check may cause any error.
        why = " ".join(str(error).split())
        if isinstance(error, ZeroDivisionError):
            zeros = [named(name) for name, value in wanted.items() if value == 0 and name not in HARMLESS]
            why += f", where 0 is {' and '.join(zeros)}"
        raise ValueError(f"it describes no model {family}: {why}") from error
    check_sizes(network)
    check_sizes(network.get_text_config(decoder=True))
    return network


def _takes(config_class: Any, name: str) -> bool:
    """Whether the class takes a key out of its arguments that it computes as a property afterwards."""
    is_property = isinstance(getattr(config_class, name, None), property)
    return is_property and f'kwargs.pop("{name}")' in inspect.getsource(config_class.__post_init__)


def _with_infinities(value: Any) -> Any:
    """transformers writes an infinity as an object, such as the limit of Mamba's `time_step_limit`."""
    if isinstance(value, list):
        return [_with_infinities(one) for one in value]
    return float(value["__float__"]) if value in _INFINITIES else value
