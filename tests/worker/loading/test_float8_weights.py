"""Checkpoints in fp8, written as compressed-tensors and others lay them out: multiplied as they are, or refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_scores import prompt_logprobs, worker_settings
from safetensors.torch import load_file, save_file
from tiny_model import write_byte_tokenizer, write_tiny_llama
from torch import Tensor
from torch.nn import functional

from kernels.float8 import FLOAT8, Float8Weight, quantize_float8
from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.quantized.packed_weights import PackedWeights, widened

Tensors = dict[str, Tensor]
Config = dict[str, Any]
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(weights: Config, inputs: Config | None) -> Config:
    """quantization_config as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": E4M3 | weights, "input_activations": inputs and E4M3 | inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


DYNAMIC = compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True})
STATIC = compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False})
METHOD = {"quant_method": "fp8", "activation_scheme": "static"}
IN_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 32]}
BY_BLOCK = compressed(
    {"strategy": "block", "block_structure": [24, 32]}, {"strategy": "group", "group_size": 32, "dynamic": True}
)


def by_channel(weight: Tensor) -> Tensors:
    numbers, scales, _ = quantize_float8(weight)
    return {"weight": numbers, "weight_scale": scales}


def by_tensor(weight: Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(FLOAT8),
        "weight_scale": scale.reshape(1),
        "input_scale": torch.tensor([40 / 448 * (1 + float(weight[0, 0].abs()))]),  # of each layer another
    }


def by_block(weight: Tensor, name: str = "weight_scale") -> Tensors:
    """Of 24 outputs, the last of which may be fewer, and 32 inputs."""
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -outputs % 24))
    blocks = padded.view(-1, 24, inputs // 32, 32).transpose(1, 2).flatten(2)
    scales = blocks.abs().amax(-1) / 448
    of_each = scales.repeat_interleave(24, 0)[:outputs].repeat_interleave(32, 1)
    return {"weight": (weight / of_each).to(FLOAT8), name: scales}


LAYOUTS: dict[str, tuple[Config, Callable[[Tensor], Tensors]]] = {
    "compressed-tensors by channel": (DYNAMIC, by_channel),
    "compressed-tensors by tensor": (STATIC, by_tensor),
    "the method fp8": (METHOD, by_tensor),
    "blocks of the method fp8": (IN_BLOCKS, partial(by_block, name="weight_scale_inv")),
    "blocks of compressed-tensors": (BY_BLOCK, by_block),
}


def meant(parts: Tensors) -> Tensor:
    numbers = parts["weight"].float()
    scales = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    if scales.numel() in (1, len(numbers)):
        return numbers * scales.reshape(-1, 1)
    return numbers * scales.repeat_interleave(24, 0)[: len(numbers)].repeat_interleave(32, 1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights that are exact in bfloat16."""
    folder = tmp_path_factory.mktemp("plain")
    write_byte_tokenizer(folder / "tokenizer")
    write_tiny_llama(folder / "model", folder / "tokenizer", intermediate_size=128, num_attention_heads=2)
    file = folder / "model" / "model.safetensors"
    save_file({name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}, file)
    return folder / "model"


def copy(plain: Path, folder: Path, config: Config, change: Callable[[Tensor], Tensors]) -> Path:
    """A copy whose linear layers are these parts."""
    folder.mkdir()
    for file in plain.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text()) | config))
    tensors: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("proj.weight"):
            tensors |= {name.removesuffix("weight") + part: value for part, value in change(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_weight_is_what_its_numbers_and_scales_mean(name: str, plain: Path, tmp_path: Path) -> None:
    config, change = LAYOUTS[name]
    found = PackedWeights(WeightFiles(copy(plain, tmp_path / "stored", {}, change)), config)
    weights = {name: tensor for name, tensor in load_file(plain / "model.safetensors").items() if "proj" in name}
    assert set(found) == set(weights)
    assert "model.embed_tokens.weight" not in found
    for weight_name, weight in weights.items():
        assert torch.equal(widened(found[weight_name]), meant(change(weight)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_is_served_with_the_weights_that_it_stores(name: str, dtype: str, plain: Path, tmp_path: Path) -> None:
    config, change = LAYOUTS[name]
    stored = copy(plain, tmp_path / "stored", {"quantization_config": config}, change)
    wide = copy(plain, tmp_path / "meant", {}, lambda weight: {"weight": meant(change(weight))})
    exact = prompt_logprobs(worker_settings(wide, dtype="float32"))
    found = prompt_logprobs(worker_settings(stored, dtype=dtype))
    assert not torch.equal(found, prompt_logprobs(worker_settings(wide, dtype=dtype)))  # inputs are rounded
    assert (found - exact).abs().mean() < 0.15 * exact.std()
    if config is DYNAMIC:  # what a worker makes of the plain weights
        settings = worker_settings(plain, "fp8", dtype=dtype)
        assert torch.equal(found, prompt_logprobs(settings))


def test_families_in_transformers_code_widen_them(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plain = make_checkpoint(model_type="starcoder2")
    config, change = LAYOUTS["compressed-tensors by channel"]
    stored = copy(plain, tmp_path / "stored", {"quantization_config": config}, change)
    wide = copy(plain, tmp_path / "meant", {}, lambda weight: {"weight": meant(change(weight))})
    found, exact = (prompt_logprobs(worker_settings(path, dtype="float32")) for path in (stored, wide))
    assert torch.equal(found, exact)


REFUSED: dict[str, tuple[Config, str]] = {
    "blocks with stored scales of inputs": (
        METHOD | {"weight_block_size": [128, 128]},
        r"a scale for each block are not read with stored scales of inputs",
    ),
    "blocks of one number": (IN_BLOCKS | {"weight_block_size": 128}, "weight_block_size is 128; it must be two"),
    "blocks of nothing": (IN_BLOCKS | {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
    "blocks of compressed-tensors without a size": (
        compressed({"strategy": "block"}, {"strategy": "group"}),
        "block_structure is None",
    ),
    "blocks beside whole rows": (
        compressed({"strategy": "block", "block_structure": [128, 64]}, {"strategy": "token"}),
        "with dynamic scales by group of 64",
    ),
    "blocks of several sizes": (
        BY_BLOCK
        | {
            "config_groups": {
                name: {
                    "weights": E4M3 | {"strategy": "block", "block_structure": [rows, 32]},
                    "input_activations": E4M3 | {"strategy": "group", "group_size": 32},
                }
                for name, rows in (("a", 96), ("b", 64))
            }
        },
        "fp8 weights with blocks of several sizes are not read",
    ),
    "blocks with stored scales of inputs, in capitals": (
        METHOD | {"weight_block_size": [128, 128], "activation_scheme": "STATIC"},
        "are not read with stored scales of inputs",
    ),
    "groups of weights": (compressed({"strategy": "group"}, {}), "fp8 weights with scales by 'group' are not read"),
    "groups of inputs": (
        compressed({"strategy": "channel"}, {"strategy": "group"}),
        r"fp8 inputs with scales by 'group' \(strategy\) are not read",
    ),
    "inputs as they are": (compressed({"strategy": "channel"}, None), "whose inputs are not rounded to fp8"),
    "inputs in int8": (compressed({}, {"type": "int"}), "whose inputs are not rounded to fp8"),
    "4 bits": (compressed({"num_bits": 4}, {}), r"weights of .*4.*float.* are not read"),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_read_is_refused_with_the_reason(config: Config, reason: str, plain: Path) -> None:
    with pytest.raises(StartError, match=reason):
        PackedWeights(WeightFiles(plain), config)


SPOILED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scale": (lambda tensors: tensors.pop("a.weight_scale"), r"there is no a\.weight_scale"),
    "no scale of inputs": (lambda tensors: tensors.pop("a.input_scale"), r"there is no a\.input_scale"),
    "scales of blocks": (
        lambda tensors: tensors.update({"a.weight_scale": torch.ones(2, 3)}),
        r"\[2, 3\] scales do not",
    ),
    "an infinite scale": (lambda tensors: tensors["a.weight_scale"].fill_(torch.inf), "a scale is not finite"),
    "no number": (lambda tensors: tensors["a.weight"].view(torch.int8)[1].fill_(-1), "a weight or a scale is not"),
    "a scale of inputs of zero": (lambda tensors: tensors["a.input_scale"].zero_(), r"input_scale is 0\.0; it must be"),
    "scales of inputs": (lambda tensors: tensors.update({"a.input_scale": torch.ones(3)}), "one positive number"),
    "a stack": (lambda tensors: tensors.update({"a.weight": torch.ones(2, 3, 4).to(FLOAT8)}), "weight has the shape"),
}


@pytest.mark.parametrize("shape", [(4, 6), (2, 12), (1, 24), (24, 1, 1)])
def test_as_many_scales_as_outputs_are_not_taken_for_theirs(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Of blocks, for example, whose size config.json does not say."""
    save_file(
        {"a.weight": torch.ones(24, 128).to(FLOAT8), "a.weight_scale": torch.ones(shape)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(StartError, match="one for each output, or one for all, are read"):
        PackedWeights(WeightFiles(tmp_path), DYNAMIC)["a.weight"]


def test_blocks_have_no_stored_scales_of_inputs(tmp_path: Path) -> None:
    parts = by_block(torch.randn(24, 128), "weight_scale_inv") | {"input_scale": torch.tensor(0.1)}
    save_file({f"a.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match="there is an input_scale, which is not supported"):
        PackedWeights(WeightFiles(tmp_path), IN_BLOCKS)["a.weight"]


def test_a_block_may_be_larger_than_a_weight(tmp_path: Path) -> None:
    parts = {"a.weight": torch.ones(64, 64).to(FLOAT8), "a.weight_scale_inv": torch.full((1, 2), 0.5)}
    save_file(parts, tmp_path / "model.safetensors")
    config = IN_BLOCKS | {"weight_block_size": [2**31 - 1, 32]}
    assert PackedWeights(WeightFiles(tmp_path), config)["a.weight"].scales.tolist() == [[0.5, 0.5]] * 64


def test_scales_of_inputs_are_found_by_the_name_that_transformers_gives_them(tmp_path: Path) -> None:
    parts = by_tensor(torch.randn(24, 128))
    parts["activation_scale"] = parts.pop("input_scale")
    save_file({f"a.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors")
    packed = PackedWeights(WeightFiles(tmp_path), METHOD | {"activation_scheme": "Static"})
    weight = packed["a.weight"]
    assert isinstance(weight, Float8Weight)
    assert weight.input_scale == parts["activation_scale"]
    assert packed.stores_input_scales


def test_zero_points_of_floats_are_refused(tmp_path: Path) -> None:
    for zeros in (torch.zeros(24, 1), torch.ones(24, 1)):
        parts = by_channel(torch.randn(24, 128)) | {"weight_zero_point": zeros.to(FLOAT8)}
        save_file({f"a.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors")
        packed = PackedWeights(WeightFiles(tmp_path), DYNAMIC)
        if zeros.any():
            with pytest.raises(StartError, match="zero points of floats are not read"):
                packed["a.weight"]
        else:
            assert torch.equal(widened(packed["a.weight"]), meant(parts))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projections_that_are_one_product_may_be_stored_differently(dtype: str, plain: Path, tmp_path: Path) -> None:
    """A layer's queries in fp8, its keys and values not."""
    stored = copy(plain, tmp_path / "stored", {"quantization_config": DYNAMIC}, by_channel)
    wide = copy(plain, tmp_path / "meant", {}, lambda weight: {"weight": meant(by_channel(weight))})
    tensors = load_file(stored / "model.safetensors")
    for name, tensor in load_file(wide / "model.safetensors").items():
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = tensor
            del tensors[name + "_scale"]
    save_file(tensors, stored / "model.safetensors")
    exact = prompt_logprobs(worker_settings(wide, dtype="float32"))
    found = prompt_logprobs(worker_settings(stored, dtype=dtype))
    assert (found - exact).abs().mean() < 0.15 * exact.std()


@pytest.mark.parametrize("name", SPOILED)
def test_a_layer_that_makes_no_sense_is_refused(name: str, tmp_path: Path) -> None:
    spoil, reason = SPOILED[name]
    tensors = {f"a.{part}": tensor for part, tensor in by_tensor(torch.randn(24, 128)).items()}
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=f"the quantised weight a.weight cannot be read: .*{reason}"):
        PackedWeights(WeightFiles(tmp_path), STATIC)["a.weight"]


@pytest.mark.parametrize(
    ("numbers", "scales"), [((48, 128), (2, 3)), ((48, 128), (1, 4)), ((48, 112), (2, 4)), ((48, 112), (2, 3))]
)
def test_blocks_cover_a_weight(numbers: tuple[int, int], scales: tuple[int, int], tmp_path: Path) -> None:
    parts = {"a.weight": torch.ones(numbers).to(FLOAT8), "a.weight_scale_inv": torch.ones(scales)}
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=r"scales do not fit weights of .* in blocks of \[24, 32\]"):
        PackedWeights(WeightFiles(tmp_path), IN_BLOCKS)["a.weight"]


def test_tables_of_vectors_in_fp8_are_refused(plain: Path, tmp_path: Path) -> None:
    stored = copy(plain, tmp_path / "stored", {"quantization_config": DYNAMIC}, by_channel)
    tensors = load_file(stored / "model.safetensors")
    table = by_channel(tensors["model.embed_tokens.weight"])
    save_file(
        tensors | {f"model.embed_tokens.{part}": tensor for part, tensor in table.items()}, stored / "model.safetensors"
    )
    with pytest.raises(StartError, match=r"model\.embed_tokens\.weight is stored in fp8; only weights of linear"):
        load_worker(worker_settings(stored))
