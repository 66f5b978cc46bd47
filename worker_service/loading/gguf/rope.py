"""Converts the keys for rotary embeddings (Su et al., 2021; yarn: Peng et al., 2023) to `rope_parameters`. llama.cpp
rotates pair i of a head at position p by `p * base**(-2i/n) / (divisor_i * factor)`, the formula of "longrope". Files
with divisors therefore become "longrope"."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from worker_service.loading.gguf.keys import GgufKeys
from worker_service.loading.gguf.kinds import NOT_NEGATIVE, NUMBER, POSITIVE, SIZE, TEXT
from worker_service.wording import shown

Divisors = Mapping[str, npt.NDArray[np.float32]]
"""Divisors of rotary pairs by tensor name: FREQS, or LONG and SHORT, or none. LONG is for texts beyond the original
context."""
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_TYPES = ("none", "linear", "yarn", "longrope")


def read_rope_parameters(keys: GgufKeys, divisors: Divisors, rotary_dim: int, max_positions: int) -> dict[str, Any]:
    """Raises ValueError if config.json cannot describe the rotary embedding."""
    theta = keys.own("rope.freq_base", POSITIVE) or 10_000.0
    kind = keys.own("rope.scaling.type", TEXT)
    kind = "linear" if kind is None else kind
    factor, older = keys.own("rope.scaling.factor", NOT_NEGATIVE), keys.own("rope.scale_linear", NOT_NEGATIVE)
    factor = (older if factor is None else factor) or 1.0  # factor 0 means no scaling
    original = keys.own("rope.scaling.original_context_length", SIZE) or max_positions  # 0: max_positions
    scale = keys.own("rope.scaling.attn_factor", POSITIVE) or 1.0
    mixed = keys.own("rope.scaling.yarn_ext_factor", NUMBER)
    if kind not in _TYPES:
        raise ValueError(f"its rope.scaling.type is {shown(kind)}; supported are {', '.join(_TYPES)}")
    if kind == "none":
        factor = 1.0
    if mixed is not None and mixed not in (-1.0, float(kind == "yarn")):
        raise ValueError(f"its rope.scaling.yarn_ext_factor is {mixed}, which is not supported with the type {kind}")
    if kind == "yarn" and factor != 1:
        if divisors:
            raise ValueError(f"its {min(divisors)} beside positions that are scaled by yarn is not supported")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": scale * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    if not divisors and scale == 1:
        plain = {"rope_type": "default", "rope_theta": theta}
        return plain if factor == 1 else plain | {"rope_type": "linear", "factor": factor}
    if len(divisors) == 1 and FREQS not in divisors:
        raise ValueError(f"it has {min(divisors)} alone; {LONG} and {SHORT} belong together")
    if FREQS in divisors and len(divisors) > 1:
        raise ValueError(f"it has {FREQS} beside {LONG}; either is supported")
    for name, values in divisors.items():
        if values.shape != (rotary_dim // 2,) or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"its {name} must be {rotary_dim // 2} numbers above 0")
    if LONG not in divisors:
        original = max_positions
        of_all = divisors.get(FREQS, np.ones(rotary_dim // 2, np.float32))
        divisors = {LONG: of_all, SHORT: of_all}
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "long_factor": [float(value) * factor for value in divisors[LONG]],
        "short_factor": [float(value) * factor for value in divisors[SHORT]],
        "original_max_position_embeddings": original,
        "attention_factor": scale,
    }
