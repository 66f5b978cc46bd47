"""Converts a GGUF file's recommended sampling parameters to a generation_config.json."""

from typing import Any

from worker_service.loading.gguf.keys import GgufKeys
from worker_service.loading.gguf.kinds import NUMBER, WHOLE, Kind

_PREFIX = "general.sampling."
_FIELDS: dict[str, tuple[str, Kind[float]]] = {
    "temp": ("temperature", Kind(float, "a number from 0 to 100", 0, 100)),
    "top_p": ("top_p", Kind(float, "a number above 0 and at most 1", 1e-45, 1)),
    "min_p": ("min_p", Kind(float, "a number from 0 to 1", 0, 1)),
    "penalty_repeat": ("repetition_penalty", Kind(float, "a number from 0.01 to 10", 0.01, 10)),
}
"""Fields of generation_config.json by key, with the limits of requests."""
_TOP_K = Kind(int, f"a whole number of at most {2**31 - 1}", most=2**31 - 1)
_NEUTRAL: dict[str, tuple[Kind[Any], float]] = {
    "xtc_probability": (NUMBER, 0.0),
    "mirostat": (WHOLE, 0),
    "penalty_last_n": (WHOLE, -1),
}
"""Keys with one supported value. penalty_last_n -1: penalties count all tokens of a text."""
_BESIDE = ("xtc_threshold", "mirostat_tau", "mirostat_eta")
"""Settings of unsupported sampling methods, without effect while a method is off."""


def read_sampling(keys: GgufKeys) -> dict[str, Any]:
    """Empty without recommendations. Raises ValueError for an unsupported sampling method."""
    found: dict[str, Any] = {}
    for key, (field, kind) in _FIELDS.items():
        if (value := keys.get(_PREFIX + key, kind)) is not None:
            found[field] = value
    if (top_k := keys.get(_PREFIX + "top_k", _TOP_K)) is not None:
        found["top_k"] = max(0, top_k)  # llama.cpp: below 1 means all tokens
    for key, (kind, neutral) in _NEUTRAL.items():
        value = keys.get(_PREFIX + key, kind)
        if value is not None and value != neutral:
            raise ValueError(f"its {_PREFIX}{key} is {value}; supported is {neutral}")
    for key in _BESIDE:
        keys.get(_PREFIX + key, NUMBER)
    return {"do_sample": True, **found} if found else {}
