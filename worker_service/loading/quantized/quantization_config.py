"""Reads the quantization_config of a config.json. Unknown keys are refused with a ValueError."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker_service.loading.quantized.compressed_groups import Block, Group, block_size, read_groups
from worker_service.loading.quantized.quantization_keys import COUNT, FLAG, SIZE, TEXT, Kind, agreed, check_keys, one_of
from worker_service.wording import named, shown

_NOTES = frozenset({
    # Settings of the quantising algorithm.
    "act_bits", "act_data_type", "act_dynamic", "act_group_aware", "act_group_size", "act_sym", "amp",
    "autoround_version", "batch_size", "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset",
    "enable_alg_ext", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "gptaq",
    "gptaq_alpha", "gradient_accumulate_steps", "hyb_act", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr",
    "meta", "minmax_lr", "mock_quantization", "model_file_base_name", "model_free", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "mse", "nsamples", "offload_to_disk", "offload_to_disk_path",
    "pad_token_id", "quantizer", "scale_dtype", "seqlen", "super_bits", "super_group_size", "tokenizer", "train_bs",
    "true_sequential",
    # Layers that are quantised; the tensors show them.
    "block_name_to_quantize", "ignored_layers", "lm_head", "modules_in_block_to_quantize", "modules_to_not_convert",
    "quant_block_list", "quant_lm_head", "static_groups", "supported_types", "to_quant_block_names",
    # Settings for other programs' kernels.
    "backend", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "max_input_length",
    "modules_to_fuse", "pack_impl", "use_cuda_fp16", "use_exllama",
})  # fmt: skip
"""Keys of GPTQ, AWQ, AutoRound and fp8 without effect here."""
_OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
_OF_INTEGERS: Mapping[str, Kind] = {
    "bits": COUNT, "group_size": SIZE, "desc_act": FLAG, "sym": FLAG, "data_type": one_of("int"),
    "act_bits": one_of(16, 32), "dynamic": _OBJECT, "extra_config": _OBJECT, "pack_dtype": one_of("int32"),
    "packing_format": TEXT, "checkpoint_format": TEXT, "format": TEXT, "method": TEXT,
}  # fmt: skip
"""Keys for integer weights. AutoRound writes its own keys into GPTQ and AWQ checkpoints, too."""
_OF_GPTQ = {**_OF_INTEGERS, "is_marlin_format": one_of(False)}
_OF_AWQ = {**_OF_INTEGERS, "w_bit": COUNT, "q_group_size": SIZE, "zero_point": FLAG, "version": TEXT}
_OF_A_LAYER: Mapping[str, Kind] = {
    "bits": COUNT, "group_size": SIZE, "desc_act": FLAG, "sym": FLAG, "data_type": TEXT,
}  # fmt: skip
"""Keys for single layers in GPTQ's "dynamic" and AutoRound's "extra_config"."""
_OF_FP8: Mapping[str, Kind] = {
    "activation_scheme": TEXT, "fmt": one_of("e4m3", "float8_e4m3fn"), "weight_block_size": block_size,
    "scale_fmt": one_of("float", "ue8m0"), "dequantize": one_of(False), "expert_dtype": one_of("fp8"),
    "quant_type": TEXT,
}  # fmt: skip
_ONE_LESS = ("gptq", "auto_round:auto_gptq", "auto_round:gptq")
"""GPTQ formats with zero points reduced by 1."""
_GPTQ = (*_ONE_LESS, "gptq_v2", "auto_round", "auto_round:gptqmodel")
_AWQ = ("gemm", "auto_round:auto_awq", "auto_round:awq")


@dataclass(frozen=True)
class QuantizationConfig:
    layout: str
    """"gptq", "awq", "compressed-tensors" or "fp8"."""
    bits: int = 0
    """Bits of a GPTQ or AWQ number, otherwise 0. GPTQ layers may differ if `layers_differ`."""
    group_size: int | None = None
    """Inputs that share a GPTQ or AWQ scale; -1: all inputs; None: unknown or different."""
    layers_differ: bool = False
    stores_one_less: bool = False
    """GPTQ zero points are reduced by 1."""
    is_ordered: bool = False
    """A GPTQ group may have inputs that are not neighbours; a tensor then has each input's group."""
    stores_input_scales: bool = False
    """Every fp8 layer must have an input scale."""
    block: Block | None = None
    """Outputs and inputs of a block of fp8 weights; None without blocks."""
    groups: tuple[Group, ...] = ()
    """Groups of compressed-tensors."""

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> "QuantizationConfig":
        """Raises ValueError if unsupported."""
        method = json.get("quant_method")
        read = _METHODS.get(str(method))
        if read is None:
            raise ValueError(
                f"weights quantised by {shown(method)} are not read; gptq, awq, auto-round, compressed-tensors, fp8 "
                "and mxfp4 are"
            )
        return read(json)


def _gptq(json: Mapping[str, Any]) -> QuantizationConfig:
    check_keys("", json, _OF_GPTQ, _NOTES)
    agreed(json, "quant_method", "method")
    return _of_gptq(json, agreed(json, "checkpoint_format", "format") or json.get("packing_format") or "gptq")


def _awq(json: Mapping[str, Any]) -> QuantizationConfig:
    check_keys("", json, _OF_AWQ, _NOTES)
    agreed(json, "quant_method", "method")
    return _of_awq(json, agreed(json, "version", "format", "checkpoint_format") or json.get("packing_format") or "gemm")


def _autoround(json: Mapping[str, Any]) -> QuantizationConfig:
    check_keys("", json, _OF_INTEGERS, _NOTES)
    layout = agreed(json, "packing_format", "checkpoint_format", "format") or "auto_round:gptq"
    return _of_awq(json, layout) if layout.lower() in _AWQ else _of_gptq(json, layout)


def _of_gptq(json: Mapping[str, Any], layout: str) -> QuantizationConfig:
    if (layout := layout.lower()) not in _GPTQ:
        raise ValueError(f"the layout {shown(layout)} is not read")
    differ = _layers_that_differ(json)
    return QuantizationConfig(
        "gptq",
        bits=_bits(json, (4, 8)),
        group_size=None if differ else json.get("group_size"),
        layers_differ=bool(differ),
        stores_one_less=layout in _ONE_LESS,
        is_ordered=json.get("desc_act") is True and not differ,
    )


def _of_awq(json: Mapping[str, Any], layout: str) -> QuantizationConfig:
    if layout.lower() not in _AWQ:
        raise ValueError(f"the layout {shown(layout.lower())} is not read")
    if differ := _layers_that_differ(json):
        raise ValueError(f"{differ[0]}: layers that differ are not read in the layout {layout}")
    return QuantizationConfig("awq", bits=_bits(json, (4,)), group_size=agreed(json, "group_size", "q_group_size"))


def _layers_that_differ(json: Mapping[str, Any]) -> list[str]:
    """Names "dynamic.PATTERN" or "extra_config.PATTERN" for layers with other settings than the rest."""
    found = []
    for name, whole in (("dynamic", None), ("extra_config", 16)):
        for pattern, layer in (json.get(name) or {}).items():
            where = f"{name}.{named(pattern)}"
            if name == "dynamic" and pattern.startswith("-:"):  # "-:" marks unquantised layers
                continue
            if not isinstance(layer, dict):
                raise ValueError(f"{where} is {shown(layer)}; it must be an object")
            check_keys(f"{where}.", layer, _OF_A_LAYER, _NOTES)
            bits = layer.get("bits")
            if whole is not None and bits is not None and bits >= whole:
                continue
            if bits not in (None, 4, 8) or layer.get("data_type", "int") != "int":
                raise ValueError(f"{where} is {shown(layer)}; layers are read in whole numbers of 4 or 8 bits")
            found.append(where)
    return found


def _bits(json: Mapping[str, Any], sizes: tuple[int, ...]) -> int:
    bits = agreed(json, "bits", "w_bit")
    if bits not in sizes:
        method = json["quant_method"]
        raise ValueError(f"bits is {shown(bits)}; {method} is read with {' or '.join(map(str, sizes))}")
    return int(bits)


def _fp8(json: Mapping[str, Any]) -> QuantizationConfig:
    check_keys("", json, _OF_FP8, _NOTES | {"kv_cache_scheme"})
    scheme = (json.get("activation_scheme") or "dynamic").lower()
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"activation_scheme is {shown(scheme)}; dynamic and static are read")
    size = json.get("weight_block_size")
    if size is not None and scheme == "static":
        raise ValueError(
            "fp8 weights with a scale for each block are not read with stored scales of inputs (activation_scheme)"
        )
    return QuantizationConfig(
        "fp8", stores_input_scales=scheme == "static", block=None if size is None else (size[0], size[1])
    )


def _compressed(json: Mapping[str, Any]) -> QuantizationConfig:
    groups = read_groups(json)
    blocks = {group.block for group in groups if group.block is not None}
    if len(blocks) > 1:
        raise ValueError("fp8 weights with blocks of several sizes are not read")
    return QuantizationConfig(
        "compressed-tensors",
        stores_input_scales=bool(groups) and all(group.stores_input_scales for group in groups),
        block=next(iter(blocks), None),
        groups=groups,
    )


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "auto-round": _autoround, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq,
    "intel/auto-round": _autoround,
}  # fmt: skip
