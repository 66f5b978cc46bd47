"""The frequencies of rotary position embeddings, from a checkpoint's config.json."""

from typing import Any

import torch
from torch import Tensor

_STATIC_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies do not depend on how long a sequence has become: cached keys stay valid as it grows."""


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Radians a position for each pair of a head, [head_dim / 2] float32, and the factor on cosines and sines.

    Understands `rope_parameters` and the older pair of `rope_theta` and `rope_scaling`. Raises ValueError for a kind
    that is not supported. (Su et al., 2021; scaled kinds as transformers defines them.)
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _STATIC_TYPES:
        raise ValueError(f"rope type '{kind}' is not supported; supported are {', '.join(_STATIC_TYPES)}")
    if kind == "default":
        theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
        return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0
    # Imported for these kinds only: it takes two seconds.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](LlamaConfig.from_dict(dict(config, model_type="llama")))
    return frequencies, float(scale)
