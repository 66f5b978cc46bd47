"""Layers that are stored in e4m3 with inputs that are rounded to it: compressed-tensors' "float-quantized", and "fp8".

A layer has a scale for each output, or one for all. Inputs are rounded with the scale that the file has for them
(`input_scale`), or each row with its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.float8 import Float8Weight
from worker_service.wording import shown


def float8_weight(numbers: Tensor, scales: Tensor, input_scale: Tensor | None) -> Float8Weight:
    """numbers: [outputs, inputs] e4m3; scales: of each output or of all, in any shape. Raises ValueError where they do
    not fit, or are no numbers."""
    outputs = len(numbers)
    if scales.numel() not in (1, outputs):
        raise ValueError(
            f"{list(scales.shape)} scales do not fit weights of {list(numbers.shape)}: one for each output, or one for "
            "all, are read"
        )
    scales = scales.float().flatten().expand(outputs).contiguous()
    # NaN in e4m3 is all ones behind the sign, and there is no infinity.
    if not scales.isfinite().all() or (numbers.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError("a weight or a scale is not finite")
    if input_scale is not None:
        input_scale = input_scale.float().squeeze()
        if input_scale.dim() or not 0 < float(input_scale) < float("inf"):
            raise ValueError(f"input_scale is {shown(input_scale.tolist())}; it must be one positive number")
    return Float8Weight(numbers, scales, input_scale)


def input_scales_are_stored(config: Mapping[str, Any]) -> bool:
    """Whether each layer must have an `input_scale`, by what quantization_config says."""
    if config["quant_method"] == "fp8":
        return bool(config.get("activation_scheme") == "static")
    groups = config.get("config_groups")
    inputs = [group.get("input_activations") for group in groups.values()] if isinstance(groups, dict) else []
    return bool(inputs) and all(isinstance(found, dict) and found.get("dynamic") is False for found in inputs)


def what_is_not_read(config: Mapping[str, Any]) -> str | None:
    """Why weights that a config of the method fp8 describes are not read, if they are not."""
    if config.get("weight_block_size") is not None:
        return "fp8 weights with a scale for each block (weight_block_size) are not read; with one for all they are"
    return None


def what_of_group_is_not_read(group: Mapping[str, Any]) -> str | None:
    """The same of a group of compressed-tensors' config whose weights are 8-bit floats."""
    strategy = group["weights"].get("strategy")
    if strategy not in ("channel", "tensor", None):
        return f"fp8 weights with scales by {shown(strategy)} are not read; by channel and by tensor they are"
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict) or (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
        return "fp8 weights whose inputs are not rounded to fp8 (input_activations) are not read"
    if inputs.get("strategy") not in ("token", "tensor", None):
        return f"fp8 inputs with scales by {shown(inputs['strategy'])} are not read; by token and by tensor they are"
    return None
