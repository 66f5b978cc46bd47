"""A config.json as transformers reads it; this service hands configs to transformers in this way only."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

# The service has a log of its own for what matters.
logging.set_verbosity_error()
logging.disable_progress_bar()

_IGNORED = frozenset({"attn_implementation", "auto_map", "experts_implementation", "fusion_config", "kernel_config",
                      "transformers_weights", "trust_remote_code"})  # fmt: skip
"""With these keys a config.json could have code fetched or other files read; the library's own classes need none."""


def parse(json: Mapping[str, Any]) -> Any:
    """The configuration of a family that transformers knows. Raises ValueError."""
    family = json.get("model_type", "of no stated type")
    if family not in CONFIG_MAPPING:
        raise ValueError(f"a model {family} is not supported: transformers does not know it")
    wanted = {name: value for name, value in json.items() if name not in _IGNORED and not name.startswith("_")}
    try:
        return AutoConfig.for_model(**wanted)
    except Exception as error:
        # Each family has checks of its own; a value that is not checked may raise any error.
        raise ValueError(f"it describes no model {family}: {' '.join(str(error).split())}") from error
