"""What a GGUF file recommends for sampling, as the fields of a generation_config.json."""

from typing import Any

from worker_service.loading.gguf_keys import GgufKeys

_PREFIX = "general.sampling."
_FIELDS = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
_NEUTRAL = {"xtc_probability": 0.0, "mirostat": 0, "penalty_last_n": -1}
"""Keys whose other values no field describes. The last one: a penalty is for all tokens of a text."""
_BESIDE = ("xtc_threshold", "mirostat_tau", "mirostat_eta")
"""Settings of the methods that are off."""


def read_sampling(keys: GgufKeys) -> dict[str, Any]:
    """Empty where the file recommends nothing. Raises ValueError for a method that is not supported."""
    found: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        if (value := keys.get(_PREFIX + key, float)) is not None:
            found[field] = value
    if (top_k := keys.get(_PREFIX + "top_k", int)) is not None:
        found["top_k"] = top_k
    for key, neutral in _NEUTRAL.items():
        value = keys.get(_PREFIX + key, type(neutral))
        if value is not None and value != neutral:
            raise ValueError(f"its {_PREFIX}{key} is {value}; supported is {neutral}")
    keys.leave(*(_PREFIX + key for key in _BESIDE))
    return {"do_sample": True, **found} if found else {}
