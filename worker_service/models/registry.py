"""Which network runs a checkpoint, by the `model_type` of its config.json."""

from collections.abc import Mapping
from typing import Any

import torch

from worker_service.models.causal_model import CausalModel
from worker_service.models.decoder import Decoder
from worker_service.models.decoder_config import DecoderConfig
from worker_service.models.families import FAMILIES


def read_config(json: Mapping[str, Any]) -> DecoderConfig:
    """Read a config.json. Raises ValueError, KeyError or TypeError where no such network can be run."""
    family = json.get("model_type", "of no stated type")
    if family not in FAMILIES:
        raise ValueError(f"a model {family} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[family](json)


def build_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> CausalModel:
    """A network with its weights allocated, without values yet."""
    return Decoder(config, dtype, device)
