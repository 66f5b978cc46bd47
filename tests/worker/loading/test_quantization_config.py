"""What a quantization_config says, at any depth, is obeyed or refused by name; published ones are read."""

import re
from collections.abc import Mapping
from math import nan
from typing import Any

import pytest

from worker_service.loading.quantized.quantization_config import QuantizationConfig

Json = dict[str, Any]
GPTQ: Json = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ: Json = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
AUTOROUND: Json = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
FP8: Json = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4: Json = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
E4M3: Json = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
BY_TOKEN: Json = E4M3 | {"strategy": "token", "dynamic": True}


def compressed(layout: str = "pack-quantized", /, **group: Any) -> Json:
    group = {"targets": ["Linear"], "weights": INT4, "input_activations": None, "output_activations": None} | group
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.5, "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
    }  # fmt: skip


FLOATS = compressed("float-quantized", weights=E4M3, input_activations=BY_TOKEN)
PUBLISHED: dict[str, Json] = {
    "AutoGPTQ": GPTQ | {"damp_percent": 0.1, "static_groups": False, "true_sequential": True,
                        "model_name_or_path": None, "model_file_base_name": "model", "is_marlin_format": False},
    "transformers' GPTQ": GPTQ | {"backend": "auto", "batch_size": 1, "block_name_to_quantize": None, "dataset": "c4",
                                  "exllama_config": {"version": 1}, "max_input_length": None, "use_cuda_fp16": False,
                                  "modules_in_block_to_quantize": None, "tokenizer": None, "use_exllama": True},
    "GPTQModel": GPTQ | {
        "method": "gptq", "checkpoint_format": "gptq", "format": "gptq", "lm_head": False, "pack_dtype": "int32",
        "pack_impl": "cpu", "act_group_aware": True, "dynamic": {"-:.*gate.*": {}, "+:.*down.*": {"bits": 8}},
        "meta": {"quantizer": ["gptqmodel:5.7.0"], "mse": 0.0, "failsafe": {"strategy": "rtn"}},
    },
    "AutoAWQ": AWQ | {"modules_to_not_convert": None, "backend": "autoawq", "do_fuse": False},
    "AutoAWQ's first": {"quant_method": "awq", "zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"},
    "AWQ of GPTQModel": AWQ | {"format": "gemm", "checkpoint_format": "gemm", "sym": False, "desc_act": False,
                               "pack_dtype": "int32", "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.0"]}},
    "AutoRound": AUTOROUND | {"packing_format": "auto_round:auto_gptq", "iters": 200, "autoround_version": "0.5.1",
                              "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
                              "low_gpu_mem_usage": True},
    "AutoRound's own words": AUTOROUND | {"quant_method": "intel/auto-round", "packing_format": "auto_round"},
    "AutoRound in AWQ's words": AUTOROUND | {"packing_format": "auto_round:auto_awq", "backend": "auto_round:awq"},
    "AutoRound as GPTQ": GPTQ | {"iters": 200, "act_bits": 16, "data_type": "int", "enable_quanted_input": True},
    "fp8 of Qwen": FP8 | {"fmt": "e4m3", "modules_to_not_convert": ["lm_head"]},
    "fp8 by tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
                      "kv_cache_scheme": "static"},
    "fp8 of transformers": FP8 | {"dequantize": False, "modules_to_convert": None, "scale_fmt": "float",
                                  "expert_dtype": "fp8"},
    "W4A16": compressed(weights=INT4 | {"actorder": "weight", "observer": "minmax", "observer_kwargs": {}}),
    "W8A8 in whole numbers": compressed(
        "int-quantized",
        weights=INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None, "block_structure": None},
        input_activations=INT4 | {"num_bits": 8, "strategy": "token", "group_size": None, "dynamic": True},
    ),
    "W8A8 in floats": FLOATS | {"version": "0.11.0", "transform_config": {}, "sparsity_config": {}},
    "floats with a cache of them": FLOATS | {"kv_cache_scheme": E4M3 | {"strategy": "tensor"}},
}  # fmt: skip


@pytest.mark.parametrize("json", PUBLISHED.values(), ids=PUBLISHED)
def test_what_is_published_is_read(json: Json) -> None:
    assert QuantizationConfig.from_json(json).layout in ("gptq", "awq", "compressed-tensors", "fp8")


@pytest.mark.parametrize(
    ("layout", "read", "less"),
    [
        ("auto_round:auto_gptq", "gptq", True),
        ("auto_round:gptq", "gptq", True),
        (None, "gptq", True),
        ("auto_round", "gptq", False),
        ("auto_round:gptqmodel", "gptq", False),
        ("auto_round:auto_awq", "awq", False),
        ("auto_round:awq", "awq", False),
    ],
)
def test_autorounds_words_are_gptqs_or_awqs(layout: str | None, read: str, less: bool) -> None:
    """As the Python package auto-round 0.16 has it (`inference/backend.py`, `inference/convert_model.py`)."""
    config = QuantizationConfig.from_json(AUTOROUND | {"packing_format": layout})
    assert (config.layout, config.stores_one_less, config.group_size) == (read, less, 128)


def changed(json: Mapping[str, Any], path: str, value: object) -> Json:
    """A copy with another value at a path such as "a.b"."""
    first, _, rest = path.partition(".")
    return {**json, first: changed(json.get(first) or {}, rest, value) if rest else value}


IN_GROUP = "config_groups.group_0"
UNKNOWN: list[tuple[Json, str]] = [
    *((json, "foo") for json in (GPTQ, AWQ, AUTOROUND, FP8, FLOATS)),
    (GPTQ, "dynamic.+:a.foo"),
    (AUTOROUND, "extra_config.a.foo"),
    (GPTQ, "rotation"),
    (GPTQ, "adapter"),
    (GPTQ, "version"),
    (GPTQ, "weight_block_size"),
    (AWQ, "config_groups"),
    (FP8, "bits"),
    (FP8, "modules_to_convert"),
    (compressed(), "bits"),
    (compressed(), "sparsity_config.foo"),
    (compressed(), "kv_cache_scheme.foo"),
    *((FLOATS, f"{IN_GROUP}.{name}") for name in ("foo", "weights.foo", "input_activations.foo")),
]


@pytest.mark.parametrize(("json", "path"), UNKNOWN, ids=str)
@pytest.mark.parametrize("value", [1, False, "x"])
def test_a_key_that_nothing_reads_is_refused_at_any_depth(json: Json, path: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"it says .*{path.rpartition('.')[2]} = {value!r}, which is not supported"):
        QuantizationConfig.from_json(changed(json, path, value))


FLAGS = ("false", 0, 1, [True])
NUMBERS = ("4", True, 4.0, 127.5, nan, 0, -2, [4], {"a": 4})
WRONG: list[tuple[Json, str, object]] = [
    *((GPTQ, name, value) for name in ("bits", "group_size") for value in NUMBERS),
    *((AWQ, name, value) for name in ("w_bit", "q_group_size") for value in NUMBERS),
    *((GPTQ, name, value) for name in ("desc_act", "sym", "is_marlin_format") for value in FLAGS),
    *((AWQ, "zero_point", value) for value in FLAGS),
    *((GPTQ, "dynamic.+:a.bits", value) for value in (*NUMBERS, 3)),
    *((AUTOROUND, "extra_config.a.bits", value) for value in (*NUMBERS, 3)),
    *((json, name, value) for json, name in ((GPTQ, "dynamic"), (AUTOROUND, "extra_config"), (GPTQ, "dynamic.+:a"))
      for value in (1, "x", [1])),
    *((json, name, value) for json, name in ((GPTQ, "format"), (AWQ, "version"), (AUTOROUND, "packing_format"))
      for value in (1, True, ["gptq"], {"a": 1})),
    *((GPTQ, "pack_dtype", value) for value in ("int8", 32)),
    *((FP8, "activation_scheme", value) for value in ("weekly", 1, True)),
    *((FP8, "fmt", value) for value in ("e5m2", "int8", 1)),
    *((FP8, "weight_block_size", value) for value in (128, [128], [128, 0], ["128", 128], [True, 128], [1, 2, 3])),
    *((FP8, "scale_fmt", value) for value in ("e5m3", 1)),
    *((FP8, name, value) for name, value in (("dequantize", True), ("expert_dtype", "fp4"))),
    *((compressed(), "config_groups", value) for value in (1, "x", [1])),
    *((compressed(), IN_GROUP, value) for value in (None, 1, "W4A16", ["Linear"])),
    *((compressed(), f"{IN_GROUP}.weights", value) for value in (1, "x", [1])),
    *((compressed(), f"{IN_GROUP}.output_activations", value) for value in (INT4, 1, "x")),
    *((compressed(), f"{IN_GROUP}.targets", value) for value in ("Linear", [1], 1)),
    *((compressed(), f"{IN_GROUP}.weights.symmetric", value) for value in FLAGS),
    *((compressed(), f"{IN_GROUP}.weights.dynamic", value) for value in (*FLAGS, True, "local")),
    *((compressed(), f"{IN_GROUP}.weights.num_bits", value) for value in (*NUMBERS[:3], 99)),
    *((compressed(), f"{IN_GROUP}.weights.strategy", value) for value in ("token", "block", "tensor_group", "x", 1)),
    *((compressed(), f"{IN_GROUP}.weights.group_size", value) for value in (*NUMBERS, None)),
    *((compressed(), f"{IN_GROUP}.weights.type", value) for value in ("nf4", 1)),
    *((FLOATS, f"{IN_GROUP}.{part}.symmetric", value) for part in ("weights", "input_activations")
      for value in (False, "true")),
    *((FLOATS, f"{IN_GROUP}.input_activations.strategy", value) for value in ("group", "x", 1)),
    *((compressed(), "ignore", value) for value in ("lm_head", [1])),
    *((compressed(), "kv_cache_scheme.num_bits", value) for value in ("8", True)),
]  # fmt: skip


@pytest.mark.parametrize(("json", "path", "value"), WRONG, ids=str)
def test_a_value_of_another_kind_is_refused_by_its_key(json: Json, path: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(path.rpartition(".")[2])):
        QuantizationConfig.from_json(changed(json, path, value))


TWICE: list[tuple[Json, str, str]] = [
    (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format", "format"),
    (AWQ | {"version": "gemm", "format": "gemv"}, "version", "format"),
    (AWQ | {"bits": 4, "w_bit": 8}, "bits", "w_bit"),
    (AWQ | {"group_size": 128, "q_group_size": 64}, "group_size", "q_group_size"),
    (GPTQ | {"method": "awq"}, "quant_method", "method"),
]


@pytest.mark.parametrize(("json", "first", "other"), TWICE, ids=str)
def test_two_names_of_one_value_say_the_same(json: Json, first: str, other: str) -> None:
    assert QuantizationConfig.from_json(json | {other: json[first]})
    with pytest.raises(ValueError, match=f"{first} is .*, and {other}, which means the same, "):
        QuantizationConfig.from_json(json)


def test_a_group_that_rounds_inputs_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config_groups\.group_0: rounded inputs of weights that are not rounded"):
        QuantizationConfig.from_json(compressed(weights=None, input_activations=BY_TOKEN))
