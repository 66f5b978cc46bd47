"""Rotary position embeddings, read from a checkpoint's config.json. (Su et al., 2021.)"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_service.wording import shown

_SCALED_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""Kinds that transformers computes for us, besides the plain one."""


@dataclass(frozen=True, eq=False)
class Rope:
    """How far each pair of a head turns from one position to the next."""

    inverse_frequencies: Tensor
    """[rotary_dim / 2] float32: radians a position. The part of a head behind rotary_dim does not turn."""
    scale: float = 1.0
    """A factor on cosines and sines."""
    max_positions: int | None = None
    """The sequence length from which on other frequencies would be needed, also for cached keys; None for never."""


def read_rope(config: Mapping[str, Any], head_dim: int, default_theta: float = 10_000.0) -> Rope:
    """Understands `rope_parameters` and the older pair of `rope_theta` and `rope_scaling`.

    `default_theta` is the family's default. Raises ValueError for a kind that is not
    supported.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError("rope_parameters that differ between kinds of layers are not supported")
    _check(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor"), "partial_rotary_factor", 1)
    _check(parameters.get("rope_theta") or config.get("rope_theta"), "rope_theta", 2**63)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        theta = parameters.get("rope_theta") or config.get("rope_theta") or default_theta
        share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        rotary_dim = int(head_dim * share)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return Rope(1.0 / theta**exponents)
    # Imported for the other kinds only: it takes two seconds.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from worker_service.models.transformers_json import parse

    family = parse(config)
    kind = family.rope_parameters["rope_type"]  # which may be another name than the file's, from an older time
    if kind not in _SCALED_TYPES:
        raise ValueError(f"rope type '{kind}' is not supported; supported are default, {', '.join(_SCALED_TYPES)}")
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](family)
    limit = family.rope_parameters["original_max_position_embeddings"] if kind == "longrope" else None
    return Rope(frequencies, float(scale), limit)


def _check(value: object, name: str, most: int) -> None:
    """Raise ValueError unless it is a number above 0 and up to that, or is not there."""
    if value and not (isinstance(value, int | float) and 0 < value <= most):
        raise ValueError(f"{name} is {shown(value)}; it must be above 0, and at most {most}")
