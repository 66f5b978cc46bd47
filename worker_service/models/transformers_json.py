"""A config.json as transformers reads it; this service hands configs to transformers in this way only."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from worker_service.models.config_keys import BOOKKEEPING, CODE, EXECUTION

# The service has a log of its own for what matters.
logging.set_verbosity_error()
logging.disable_progress_bar()


def parse(json: Mapping[str, Any]) -> Any:
    """The configuration of a family that transformers knows. Raises ValueError."""
    family = json.get("model_type", "of no stated type")
    if family not in CONFIG_MAPPING:
        raise ValueError(f"a model {family} is not supported: transformers does not know it")
    # Some of these would have code fetched, or other files read, or set what transformers keeps to itself.
    own = {field.name for field in fields(CONFIG_MAPPING[family])}
    wanted = {
        name: value
        for name, value in json.items()
        if name not in BOOKKEEPING | CODE | EXECUTION
        and (name in own or not name.startswith("_"))
        and not (name == "rope_scaling" and value is None)  # transformers warns of it
    }
    try:
        return AutoConfig.for_model(**wanted)
    except Exception as error:
        # Each family has checks of its own; a value that is not checked may raise any error.
        raise ValueError(f"it describes no model {family}: {' '.join(str(error).split())}") from error
