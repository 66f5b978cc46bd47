"""Layers that are stored in e4m3 with inputs that are rounded to it: compressed-tensors' "float-quantized", and "fp8".

A layer has a scale for each output, or one for all, or one for each block of some outputs and inputs. Inputs are
rounded with the scale that the file has for them (`input_scale`), or each row with its own, and where there are blocks
each row with one for the inputs of each.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.float8 import Float8Weight
from worker_service.wording import shown

Block = tuple[int, int]
"""Outputs and inputs that share a scale."""


def float8_weight(
    numbers: Tensor, scales: Tensor, input_scale: Tensor | None, block: Block | None = None
) -> Float8Weight:
    """numbers: [outputs, inputs] e4m3; scales: of each `block`, [blocks of outputs, blocks of inputs], or without one
    of each output, [outputs] or [outputs, 1], or of all. Raises ValueError where they do not fit, or are no numbers."""
    outputs, inputs = numbers.shape
    if block is not None:
        if input_scale is not None:
            raise ValueError("there is a stored scale of inputs, which are rounded by block where weights have blocks")
        if inputs % block[1] or scales.shape != (-(-outputs // block[0]), inputs // block[1]):
            raise ValueError(
                f"{list(scales.shape)} scales do not fit weights of {list(numbers.shape)} in blocks of {list(block)}; "
                "the last block of outputs may be smaller, and no block of inputs"
            )
        scales = scales.float().repeat_interleave(min(block[0], outputs), dim=0)[:outputs].contiguous()
    elif scales.numel() != 1 and list(scales.shape) not in ([outputs], [outputs, 1]):
        raise ValueError(
            f"{list(scales.shape)} scales do not fit weights of {list(numbers.shape)}: one for each output, or one for "
            "all, are read"
        )
    else:
        scales = scales.float().reshape(-1, 1).expand(outputs, 1).contiguous()
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
        return str(config.get("activation_scheme")).lower() == "static"
    groups = config.get("config_groups")
    inputs = [group.get("input_activations") for group in groups.values()] if isinstance(groups, dict) else []
    return bool(inputs) and all(isinstance(found, dict) and found.get("dynamic") is False for found in inputs)


def block_of(config: Mapping[str, Any]) -> Block | None:
    """The blocks that have scales, by what quantization_config says, which `what_is_not_read` has nothing against."""
    if config["quant_method"] == "fp8":
        size = config.get("weight_block_size")
    else:
        sizes = _block_structures(config)
        size = sizes[0] if sizes else None
    return None if size is None else (size[0], size[1])


def _block_structures(config: Mapping[str, Any]) -> list[Any]:
    """Of compressed-tensors' groups whose weights have blocks."""
    groups = config.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    blocks = [found for found in weights if isinstance(found, dict) and found.get("strategy") == "block"]
    return [found.get("block_structure") for found in blocks]


def what_is_not_read(config: Mapping[str, Any]) -> str | None:
    """Why weights are not read that a config of the method fp8 describes, or several groups of compressed-tensors'
    config together, if they are not."""
    sizes = _block_structures(config)
    if any(one != sizes[0] for one in sizes):
        return "fp8 weights with blocks of several sizes are not read"
    size = config.get("weight_block_size")
    if size is None:
        return None
    if input_scales_are_stored(config):
        return "fp8 weights with a scale for each block are not read with stored scales of inputs (activation_scheme)"
    return _what_of_block_is_not_read("weight_block_size", size)


def what_of_group_is_not_read(group: Mapping[str, Any]) -> str | None:
    """The same of a group of compressed-tensors' config whose weights are 8-bit floats."""
    weights, inputs = group["weights"], group.get("input_activations")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy not in ("channel", "tensor", "block", None):
        return f"fp8 weights with scales by {shown(strategy)} are not read; by channel, tensor and block they are"
    if not isinstance(inputs, dict) or (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
        return "fp8 weights whose inputs are not rounded to fp8 (input_activations) are not read"
    if strategy == "block":
        if (reason := _what_of_block_is_not_read("block_structure", block)) is not None:
            return reason
        if (inputs.get("strategy"), inputs.get("group_size")) != ("group", block[1]) or inputs.get("dynamic") is False:
            return (
                f"fp8 inputs of weights with scales by block are read with scales of their own by group of {block[1]}"
            )
    elif inputs.get("strategy") not in ("token", "tensor", None):
        return f"fp8 inputs with scales by {shown(inputs['strategy'])} are not read; by token and by tensor they are"
    return None


def _what_of_block_is_not_read(name: str, size: object) -> str | None:
    if isinstance(size, list) and len(size) == 2 and all(type(one) is int and 0 < one < 2**31 for one in size):
        return None
    return f"{name} is {shown(size)}; it must be two numbers, of outputs and of inputs"
