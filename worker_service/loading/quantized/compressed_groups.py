"""Reads the groups of layers in a compressed-tensors config: how weights are stored and inputs quantised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_service.loading.quantized.quantization_keys import FLAG, SIZE, TEXT, TEXTS, Kind, check_keys, one_of
from worker_service.wording import named, shown

Block = tuple[int, int]
"""Outputs and inputs of a block that shares one scale."""
block_size: Kind = (
    "two numbers, of outputs and of inputs",
    lambda size: (
        isinstance(size, list) and len(size) == 2 and all(type(one) is int and 0 < one < 2**31 for one in size)
    ),
)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
_NUMBER: Kind = ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
_OF_CONFIG: Mapping[str, Kind] = {
    "config_groups": _OBJECT, "format": TEXT, "sparsity_config": _OBJECT, "kv_cache_scheme": _OBJECT,
    # Ignored, because the tensors show which layers are quantised.
    "ignore": TEXTS, "quantization_status": TEXT, "version": TEXT, "global_compression_ratio": _NUMBER,
    "run_compressed": FLAG,
}  # fmt: skip
_OF_GROUP: Mapping[str, Kind] = {
    "targets": TEXTS, "format": TEXT, "weights": _OBJECT, "input_activations": _OBJECT,
    "output_activations": one_of(),
}  # fmt: skip
_OF_NUMBERS: Mapping[str, Kind] = {
    "num_bits": ("a whole number from 1 to 16", lambda value: type(value) is int and 1 <= value <= 16),
    "type": one_of("int", "float"), "symmetric": FLAG, "group_size": SIZE, "block_structure": block_size,
    "strategy": one_of("tensor", "channel", "group", "block", "token"), "dynamic": FLAG,
}  # fmt: skip
_NOTES_OF_NUMBERS = ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Keys without effect. Tensors show the order of inputs and the types of scales and zero points."""
_OF_SPARSITY = {"format": one_of("dense")}
_NOTES_OF_SPARSITY = ("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets")


@dataclass(frozen=True)
class Group:
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    """The part that shares one scale: "tensor", "channel" (an output), "group" (inputs of an output) or "block"."""
    group_size: int | None
    block: Block | None
    stores_input_scales: bool

    def fits(self, bits: int, inputs: int, scales: int, *, has_zeros: bool) -> bool:
        """Whether an integer weight has this group's settings. scales: scales of each output."""
        if self.is_float or bits != self.bits or not (has_zeros or self.is_symmetric):
            return False
        if self.strategy == "group" and self.group_size is not None and self.group_size > 0:
            return scales == -(-inputs // self.group_size)
        return scales == 1


def read_groups(json: Mapping[str, Any]) -> tuple[Group, ...]:
    """The groups with quantised weights. Raises ValueError if a setting is not supported."""
    if json.get("transform_config"):
        raise ValueError("weights that are rotated (transform_config) are not read")
    check_keys("", {name: value for name, value in json.items() if name != "transform_config"}, _OF_CONFIG)
    sparsity = json.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError("weights that are sparse (sparsity_config) are not read")
    check_keys("sparsity_config.", sparsity, _OF_SPARSITY, _NOTES_OF_SPARSITY)
    check_keys(
        "kv_cache_scheme.", json.get("kv_cache_scheme") or {}, _OF_NUMBERS, _NOTES_OF_NUMBERS
    )  # checked only: --kv-cache-dtype chooses the type of the KV cache
    groups, formats = json.get("config_groups") or {}, list[Any]()
    for name, group in groups.items():
        where = f"config_groups.{named(name)}"
        if not isinstance(group, dict):
            raise ValueError(f"{where} is {shown(group)}; it must be an object")
        check_keys(f"{where}.", group, _OF_GROUP)
        formats += [group["format"]] if group.get("format") else []
    if not formats or json.get("format") != "mixed-precision":
        formats = [*formats, json.get("format")]
    for name in formats:
        if name not in _FORMATS:
            raise ValueError(
                f"the format {shown(name)} is not read; pack-quantized, int-quantized and float-quantized are"
            )
    return tuple(
        _group(f"config_groups.{named(name)}", group)
        for name, group in groups.items()
        if group.get("weights") or group.get("input_activations")
    )


def _group(where: str, json: Mapping[str, Any]) -> Group:
    weights, inputs = json.get("weights"), json.get("input_activations") or {}
    if not weights:
        raise ValueError(f"{where}: rounded inputs of weights that are not rounded are not supported")
    check_keys(f"{where}.weights.", weights, _OF_NUMBERS, _NOTES_OF_NUMBERS)
    check_keys(f"{where}.input_activations.", inputs, _OF_NUMBERS, _NOTES_OF_NUMBERS)
    bits, kind, size = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("group_size")
    if (bits, kind) not in ((4, "int"), (8, "int"), (8, "float")):
        raise ValueError(
            f"weights of {shown((bits, kind))} are not read; whole numbers of 4 and 8 bits, and floats of 8, are"
        )
    if weights.get("dynamic"):
        raise ValueError(f"{where}.weights.dynamic is true; weights are read with scales that are stored")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size < 0 else "group")
    block = weights.get("block_structure") if strategy == "block" else None
    if kind == "float":
        _check_floats(where, strategy, weights, inputs)
    elif strategy in ("token", "block") or (strategy == "group" and size is None):
        raise ValueError(f"{where}.weights: strategy is {strategy} and group_size {size}, which are not read together")
    return Group(
        bits=bits,
        is_float=kind == "float",
        is_symmetric=weights.get("symmetric", True),
        strategy=strategy,
        group_size=size,
        block=None if block is None else (block[0], block[1]),
        stores_input_scales=bool(inputs) and inputs.get("dynamic") is False,
    )


def _check_floats(where: str, strategy: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Refuse unsupported settings of fp8 weights or inputs."""
    if strategy not in ("channel", "tensor", "block"):
        raise ValueError(f"fp8 weights with scales by {shown(strategy)} are not read; by channel, tensor and block are")
    if (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
        raise ValueError("fp8 weights whose inputs are not rounded to fp8 (input_activations) are not read")
    for name, numbers in (("weights", weights), ("input_activations", inputs)):
        if numbers.get("symmetric") is False:
            raise ValueError(f"{where}.{name}.symmetric is false; zero points of floats are not read")
    if strategy == "block":
        block = weights.get("block_structure")
        if block is None:
            raise ValueError(f"block_structure is None; it must be {block_size[0]}")
        if (inputs.get("strategy"), inputs.get("group_size")) != ("group", block[1]) or inputs.get("dynamic") is False:
            raise ValueError(f"fp8 weights with scales by block need inputs with dynamic scales by group of {block[1]}")
    elif inputs.get("strategy") not in ("token", "tensor", None):
        raise ValueError(
            f"fp8 inputs with scales by {shown(inputs['strategy'])} (strategy) are not read; by token and by tensor "
            "they are"
        )
