"""A config.json as transformers reads it; this service hands configs to transformers in this way only."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from worker_service.models.config.config_keys import BOOKKEEPING, CODE, EXECUTION, HARMLESS
from worker_service.models.config.transformers_values import check_sizes, check_values
from worker_service.wording import named

# The service has a log of its own for what matters.
logging.set_verbosity_error()
logging.disable_progress_bar()

_PROPERTIES = frozenset({"model_type", "num_labels", "rope_scaling"})
"""What every class takes without having it as a field."""


def parse(json: Mapping[str, Any]) -> Any:
    """The configuration of a family that transformers knows. Raises ValueError."""
    family = json.get("model_type", "of no stated type")
    if family not in CONFIG_MAPPING:
        raise ValueError(f"a model {family} is not supported: transformers does not know it")
    config_class = CONFIG_MAPPING[family]
    check_values(json, config_class)
    own = {field.name for field in fields(config_class)} | _PROPERTIES
    wanted = {
        name: value
        for name, value in json.items()
        # Some of these would have code fetched, or other files read.
        if name not in BOOKKEEPING | CODE | EXECUTION
        # These would take the place of a method, or of what transformers keeps to itself.
        and (name in own or not (name.startswith("_") or hasattr(config_class, name)))
        # transformers warns of the first, and would have null for the name that these are other names of.
        and not (value is None and (name == "rope_scaling" or name in config_class.attribute_map))
    }
    try:
        network = AutoConfig.for_model(**wanted)
    except Exception as error:
        # Each family has checks of its own; a value that is not checked may raise any error.
        why = " ".join(str(error).split())
        if isinstance(error, ZeroDivisionError):
            zeros = [named(name) for name, value in wanted.items() if value == 0 and name not in HARMLESS]
            why += f", where 0 is {' and '.join(zeros)}"
        raise ValueError(f"it describes no model {family}: {why}") from error
    check_sizes(network)
    return network
