"""Checkpoints that were quantised when they were written: read as their writers document them, or refused."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_scores import prompt_logprobs, worker_settings
from safetensors.torch import load_file, save_file
from tiny_model import write_byte_tokenizer, write_tiny_llama
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.quantized.packed_weights import PackedWeights, widened
from worker_service.models.layers.linear import can_pack

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """`(number - zero) * scale`, as any of the layouts stores it."""

    numbers: list[list[int]]
    """Of each output, of each input: below 2 to the power of `bits`."""
    zeros: list[list[int]]
    """Of each output, of each group."""
    scales: Tensor
    """[outputs, groups] float16."""
    bits: int

    @classmethod
    def draw(cls, outputs: int, inputs: int, groups: int, bits: int, seed: int = 0) -> "Layer":
        """Zeros and scales whose products float16 has."""
        draw = torch.Generator().manual_seed(seed)
        numbers = torch.randint(0, 2**bits, (outputs, inputs), generator=draw)
        zeros = torch.randint(0, 2**bits, (outputs, groups), generator=draw)
        scales = torch.randint(1, 8, (outputs, groups), generator=draw) / 2 ** (bits + 5)
        return cls(numbers.tolist(), zeros.tolist(), scales.half(), bits)

    @property
    def weight(self) -> Tensor:
        """In float32."""
        size = len(self.numbers[0]) // len(self.zeros[0])
        zeros, scales = (
            torch.as_tensor(part, dtype=torch.float32).repeat_interleave(size, 1) for part in (self.zeros, self.scales)
        )
        return (torch.tensor(self.numbers) - zeros) * scales

    def symmetric(self) -> "Layer":
        return replace(self, zeros=[[2 ** (self.bits - 1)] * len(row) for row in self.zeros])


def words(values: Sequence[int], bits: int) -> int:
    """One int32, the first value in its lowest bits."""
    word = sum(value << bits * place for place, value in enumerate(values))
    return word - (word >> 31 << 32)


def packed(rows: Sequence[Sequence[int]], bits: int) -> Tensor:
    """Along each row; the last word may be filled in part."""
    each = 32 // bits
    return torch.tensor(
        [[words(row[i : i + each], bits) for i in range(0, len(row), each)] for row in rows], dtype=torch.int32
    )


def transposed(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def gptq(layer: Layer, stored: int = -1) -> Tensors:
    inputs, groups = len(layer.numbers[0]), len(layer.zeros[0])
    return {
        "qweight": packed(layer.numbers, layer.bits).T.contiguous(),
        "qzeros": packed(transposed(layer.zeros), layer.bits) + stored * (2**32 // (2**layer.bits - 1)),
        "scales": layer.scales.T.contiguous(),
        "g_idx": torch.tensor([place // (inputs // groups) for place in range(inputs)], dtype=torch.int32),
    }


def awq(layer: Layer) -> Tensors:
    def ordered(row: Sequence[int]) -> list[int]:
        return [row[first + place] for first in range(0, len(row), 8) for place in AWQ_ORDER]

    return {
        "qweight": packed([ordered(row) for row in transposed(layer.numbers)], 4),
        "qzeros": packed([ordered(row) for row in transposed(layer.zeros)], 4),
        "scales": layer.scales.T.contiguous(),
    }


def compressed(layer: Layer) -> Tensors:
    tensors = {
        "weight_packed": packed(layer.numbers, layer.bits),
        "weight_scale": layer.scales.bfloat16(),
        "weight_shape": torch.tensor([len(layer.numbers), len(layer.numbers[0])]),
    }
    if layer.zeros != layer.symmetric().zeros:
        tensors["weight_zero_point"] = packed(transposed(layer.zeros), layer.bits).T.contiguous()
    return tensors


def int_quantized(layer: Layer) -> Tensors:
    tensors = {"weight": (torch.tensor(layer.numbers) - 128).to(torch.int8), "weight_scale": layer.scales.float()}
    if layer.zeros != layer.symmetric().zeros:
        tensors["weight_zero_point"] = (torch.tensor(layer.zeros) - 128).to(torch.int8)
    return tensors


def of_gptq(bits: int, layout: str = "gptq", field: str = "checkpoint_format") -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, field: layout}


AWQ = {"quant_method": "awq", "bits": 4, "version": "GEMM"}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT = {"quant_method": "compressed-tensors", "format": "int-quantized"}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Layer], Tensors], int, bool]] = {
    "gptq, 4 bits": (of_gptq(4), gptq, 4, False),
    "gptq, 8 bits": (of_gptq(8), gptq, 8, False),
    "gptq_v2": (of_gptq(4, "gptq_v2"), lambda layer: gptq(layer, stored=0), 4, False),
    "AutoRound's words": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
        lambda layer: gptq(layer, stored=0),
        4,
        False,
    ),
    "AutoRound in GPTQ's words": (
        {"quant_method": "auto-round", "bits": 8, "packing_format": "auto_round:auto_gptq"},
        gptq,
        8,
        False,
    ),
    "AutoRound in AWQ's words": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
        awq,
        4,
        False,
    ),
    "gptq_v2 in other words": (of_gptq(4, "GPTQ_V2", "format"), lambda layer: gptq(layer, stored=0), 4, False),
    "awq": (AWQ, awq, 4, False),
    "compressed, 4 bits": (PACKED, compressed, 4, False),
    "compressed, 4 bits, symmetric": (PACKED, compressed, 4, True),
    "compressed, 8 bits": (PACKED, compressed, 8, False),
    "int8": (INT, int_quantized, 8, True),
    "int8, asymmetric": (INT, int_quantized, 8, False),
}
"""What config.json says, how a layer is stored, its bits, and whether all zeros are in the middle."""


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> PackedWeights:
    save_file(tensors, folder / "model.safetensors")
    return PackedWeights(WeightFiles(folder), config)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("groups", [4, 2, 1, 8])
def test_a_layer_is_what_its_writer_says(name: str, groups: int, tmp_path: Path) -> None:
    """128 inputs in groups of 32, 64, all, and 16; 24 outputs."""
    config, store, bits, is_symmetric = LAYOUTS[name]
    layer = Layer.draw(24, 128, groups, bits)
    layer = layer.symmetric() if is_symmetric else layer
    found = write(
        tmp_path, config, {f"a.{part}": tensor for part, tensor in store(layer).items()} | {"b": torch.ones(2)}
    )
    assert list(found) == ["a.weight"]
    weight = found["a.weight"]
    assert weight.bits == (8 if groups == 8 else bits)  # there are no products with 4 bits and groups of 16
    assert weight.numbers.tolist() == layer.numbers
    assert weight.scales.shape == (24, 8 if groups == 8 else 4)
    assert (weight.minimums is None) == (is_symmetric and groups != 8)
    assert torch.equal(widened(weight), layer.weight)


def test_layers_of_one_checkpoint_may_be_stored_in_different_ways(tmp_path: Path) -> None:
    """As compressed-tensors and gptqmodel say it; zeros may have bytes of their own."""
    by_words, by_bytes = Layer.draw(24, 128, 4, 4), Layer.draw(24, 128, 2, 8, seed=1)
    tensors = {f"a.{part}": tensor for part, tensor in compressed(by_words).items()}
    tensors["a.weight_zero_point"] = (torch.tensor(by_words.zeros) - 8).to(torch.int8)
    tensors |= {f"b.{part}": tensor for part, tensor in int_quantized(by_bytes).items()}
    groups = {
        "words": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}, "format": "pack-quantized"},
        "bytes": {"weights": {"num_bits": 8, "type": "int", "group_size": 64}, "format": "int-quantized"},
        "activations": {"weights": None},
    }
    found = write(tmp_path, PACKED | {"format": "mixed-precision", "config_groups": groups}, tensors)
    assert sorted(found) == ["a.weight", "b.weight"]
    assert torch.equal(widened(found["a.weight"]), by_words.weight)
    assert torch.equal(widened(found["b.weight"]), by_bytes.weight)
    tensors = {f"a.{part}": tensor for part, tensor in gptq(by_words).items()}
    tensors |= {f"b.{part}": tensor for part, tensor in gptq(by_bytes).items()}
    found = write(tmp_path, of_gptq(4) | {"group_size": 128, "dynamic": {"b": {"bits": 8}}}, tensors)
    assert torch.equal(widened(found["a.weight"]), by_words.weight)
    assert torch.equal(widened(found["b.weight"]), by_bytes.weight)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_layer_may_have_one_scale_and_one_zero(shape: tuple[int, ...], tmp_path: Path) -> None:
    layer = Layer.draw(24, 128, 1, 8)
    layer = replace(layer, zeros=[layer.zeros[0]] * 24, scales=layer.scales[:1].expand(24, 1))
    tensors = int_quantized(layer)
    for part in ("weight_scale", "weight_zero_point"):
        tensors[part] = tensors[part][0].reshape(shape).clone()
    found = write(tmp_path, INT, {f"a.{part}": tensor for part, tensor in tensors.items()})
    assert torch.equal(widened(found["a.weight"]), layer.weight)


@pytest.mark.parametrize("scale", [3e-5, 1e-6, 1e-7])
def test_what_is_stored_as_zero_is_zero_with_the_smallest_scale(scale: float, tmp_path: Path) -> None:
    """Which float16 has with few bits."""
    layer = replace(Layer.draw(24, 128, 1, 8).symmetric(), scales=torch.full((24, 1), scale))
    found = write(tmp_path, INT, {f"a.{part}": tensor for part, tensor in int_quantized(layer).items()})
    zero = torch.tensor(layer.numbers) == 128
    assert (widened(found["a.weight"]) == 0)[zero].all()
    assert torch.allclose(widened(found["a.weight"]), layer.weight, rtol=0.2 if scale == 1e-7 else 0.02)


@pytest.mark.parametrize(("outputs", "inputs", "groups"), [(3, 100, 1), (5, 33, 1), (1, 7, 1), (7, 96, 3)])
def test_a_row_may_have_any_length_if_it_is_one_group(outputs: int, inputs: int, groups: int, tmp_path: Path) -> None:
    """Words that are filled in part end the rows, and the columns of zeros."""
    layer = Layer.draw(outputs, inputs, groups, 4)
    found = write(tmp_path, PACKED, {f"a.{part}": tensor for part, tensor in compressed(layer).items()})
    assert torch.equal(widened(found["a.weight"]), layer.weight)


def by_activation(layer: Layer, seed: int = 0) -> tuple[Layer, Tensors]:
    """As GPTQ stores a layer whose groups have inputs from everywhere (`desc_act`), and the layer that is meant."""
    inputs, groups = len(layer.numbers[0]), len(layer.zeros[0])
    place = torch.randperm(
        inputs, generator=torch.Generator().manual_seed(seed)
    )  # among those in order of their groups
    numbers = torch.tensor(layer.numbers)[:, place].tolist()
    group_of = (place // (inputs // groups)).int()
    each = replace(
        layer,
        numbers=numbers,
        zeros=torch.tensor(layer.zeros)[:, group_of].tolist(),
        scales=layer.scales[:, group_of],
    )
    return each, gptq(replace(layer, numbers=numbers)) | {"g_idx": group_of}


@pytest.mark.parametrize("groups", [4, 2, 8])
def test_groups_may_have_inputs_from_everywhere(groups: int, tmp_path: Path) -> None:
    meant, tensors = by_activation(Layer.draw(24, 128, groups, 4))
    found = write(tmp_path, of_gptq(4), {f"a.{part}": tensor for part, tensor in tensors.items()})
    assert torch.equal(widened(found["a.weight"]), meant.weight)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_byte_tokenizer(folder / "tokenizer")
    write_tiny_llama(folder / "model", folder / "tokenizer", intermediate_size=128, num_attention_heads=2)
    return folder / "model"


@pytest.fixture(scope="module")
def with_experts(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("with_experts")
    sizes = {name: json.loads((plain / "config.json").read_text())[name] for name in KEPT}
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, initializer_range=0.2)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((plain / file).read_bytes())
    return folder


KEPT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
ORDERED = ", by activation"


def quantise(plain: Path, folder: Path, name: str, size: int = 32) -> tuple[Path, Path]:
    """A copy with quantised layers, and one with the values that these mean."""
    config, store, bits, is_symmetric = LAYOUTS[name.removesuffix(ORDERED)]
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for number, (tensor_name, tensor) in enumerate(load_file(plain / "model.safetensors").items()):
        if not tensor_name.endswith("proj.weight"):
            stored[tensor_name] = meant[tensor_name] = tensor
            continue
        layer = Layer.draw(*tensor.shape, tensor.shape[1] // size, bits, number)
        layer = layer.symmetric() if is_symmetric else layer
        parts = store(layer)
        if name.endswith(ORDERED):  # of queries, keys and values the same
            layer, parts = by_activation(layer, tensor.shape[1] + ("gate" in tensor_name))
        meant[tensor_name] = layer.weight
        stored |= {tensor_name.removesuffix("weight") + part: value for part, value in parts.items()}
    words = json.loads((plain / "config.json").read_text())
    for place, tensors, added in (
        (folder / "stored", stored, {"quantization_config": config}),
        (folder / "meant", meant, {}),
    ):
        place.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (place / file).write_bytes((plain / file).read_bytes())
        (place / "config.json").write_text(json.dumps(words | added))
        save_file(tensors, place / "model.safetensors")
    return folder / "stored", folder / "meant"


@pytest.mark.parametrize("name", ["gptq, 4 bits", "gptq, 4 bits" + ORDERED, "awq", "compressed, 4 bits", "int8"])
@pytest.mark.parametrize("size", [32, 16])
def test_a_model_is_served_with_the_weights_that_it_stores(name: str, size: int, plain: Path, tmp_path: Path) -> None:
    check_served(*quantise(plain, tmp_path, name, size))


@pytest.mark.parametrize("name", ["gptq, 4 bits", "awq"])
def test_experts_are_served_with_the_weights_that_they_store(name: str, with_experts: Path, tmp_path: Path) -> None:
    check_served(*quantise(with_experts, tmp_path, name))


def test_quantised_weights_are_found_by_the_names_of_others(plain: Path, tmp_path: Path) -> None:
    stored, meant = quantise(plain, tmp_path, "awq")
    tensors = load_file(stored / "model.safetensors")
    renamed = {re.sub(r"^model\.", "backbone.", name): tensor for name, tensor in tensors.items()}
    save_file(renamed, stored / "model.safetensors")
    check_served(stored, meant)


def check_served(stored: Path, meant: Path) -> None:
    exact = prompt_logprobs(worker_settings(meant, dtype="float32"))
    assert torch.equal(prompt_logprobs(worker_settings(stored, dtype="float32")), exact)
    if not can_pack(torch.device("cpu"), torch.bfloat16, "int4"):
        pytest.skip("the CPU's kernels are not compiled")
    packed = prompt_logprobs(worker_settings(stored))
    assert not torch.equal(packed, prompt_logprobs(worker_settings(meant)))  # inputs are rounded to 8 bits
    assert (packed - exact).abs().mean() < 0.1 * exact.std()


def test_a_head_beside_tied_embeddings_is_used(plain: Path, tmp_path: Path) -> None:
    stored, meant = quantise(plain, tmp_path, "awq")
    expected = prompt_logprobs(worker_settings(meant, dtype="float32"))
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert torch.equal(prompt_logprobs(worker_settings(stored, dtype="float32")), expected)
    tensors = load_file(stored / "model.safetensors")
    head = Layer.draw(264, 64, 2, 4)
    (stored / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "vocab_size": 264}))
    tensors["model.embed_tokens.weight"] = torch.randn(264, 64)
    del tensors["lm_head.weight"]
    save_file(tensors | {"lm_head.weight": head.weight}, stored / "model.safetensors")
    expected = prompt_logprobs(worker_settings(stored, dtype="float32"))
    quantised = {f"lm_head.{part}": tensor for part, tensor in awq(head).items()}
    save_file(tensors | quantised, stored / "model.safetensors")
    assert torch.equal(prompt_logprobs(worker_settings(stored, dtype="float32")), expected)


def test_a_part_of_a_quantised_layer_that_is_not_read_is_refused(plain: Path, tmp_path: Path) -> None:
    stored, _ = quantise(plain, tmp_path, "awq")
    tensors = load_file(stored / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight_global_scale": torch.ones(1)}, stored / "model.safetensors")
    with pytest.raises(
        StartError, match=r"config\.json does not use: model\.layers\.0\.mlp\.up_proj\.weight_global_scale"
    ):
        load_worker(worker_settings(stored))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes' are not read; gptq, awq, "),
    "no method": ({}, "quantised by None are not read"),
    "bits": (of_gptq(3), "bits is 3; gptq is read with 4 or 8"),
    "bits in words": ({"quant_method": "awq", "bits": "4"}, "bits is '4'; it must be a whole number"),
    "a layout": (AWQ | {"version": "gemv"}, "the layout 'gemv' is not read"),
    "marlin": (of_gptq(4, "marlin"), "the layout 'marlin' is not read"),
    "a format": (PACKED | {"format": "nvfp4-pack-quantized"}, "the format 'nvfp4-pack-quantized' is not read"),
    "a group's format": (PACKED | {"config_groups": {"g": {"format": "marlin-24"}}}, "'marlin-24' is not"),
    "mixed": (PACKED | {"format": "mixed-precision"}, "the format 'mixed-precision' is not read"),
    "rotated": (PACKED | {"transform_config": {"config_groups": {}}}, "that are rotated"),
    "other bits": (PACKED | {"config_groups": {"g": {"weights": {"num_bits": 7}}}}, r"weights of .*7.* are not read"),
    "floats": (INT | {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}}, "whole numbers of 4"),
    "an unknown key": (AWQ | {"rotation": "hadamard"}, "quantization_config: it says rotation = 'hadamard', which"),
    "sparse": (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "that are sparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_the_reason(name: str, plain: Path) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(StartError, match=reason):
        PackedWeights(WeightFiles(plain), config)


SPOILED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scales": (lambda tensors: tensors.pop("a.scales"), r"there is no a\.scales"),
    "no zeros": (lambda tensors: tensors.pop("a.qzeros"), r"there is no a\.qzeros"),
    "scales of another shape": (lambda tensors: tensors.update({"a.scales": torch.ones(3, 5)}), "scales and"),
    "scales in a row": (lambda tensors: tensors.update({"a.scales": torch.ones(24)}), r"scales has the shape \[24\]"),
    "words of a wrong type": (lambda tensors: tensors.update({"a.qzeros": torch.ones(4, 3)}), "no words of packed"),
    "an infinite scale": (lambda tensors: tensors["a.scales"].fill_(float("inf")), "not finite in float16"),
    "a huge scale": (lambda tensors: tensors.update({"a.scales": torch.full((4, 24), 7e4)}), "not finite in float16"),
    "groups of several sizes": (lambda tensors: tensors["a.g_idx"][:40].fill_(1), "to 4 groups of equal size"),
    "too many groups": (lambda tensors: tensors["a.g_idx"].add_(1), "to 4 groups of equal size"),
    "groups of too few": (
        lambda tensors: tensors.update({"a.g_idx": torch.zeros(3).int()}),
        r"g_idx has the shape \[3\]",
    ),
    "an order in a matrix": (lambda tensors: tensors.update({"a.g_idx": torch.zeros(2, 64).int()}), "g_idx has the"),
    "an order of one number": (lambda tensors: tensors.update({"a.g_idx": torch.tensor(0)}), "g_idx has the shape"),
    "odd groups": (
        lambda tensors: tensors.update({"a.scales": torch.ones(16, 24), "a.qzeros": torch.ones(16, 3).int()}),
        "groups of 8 inputs are not read",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_layer_that_makes_no_sense_is_refused(name: str, tmp_path: Path) -> None:
    spoil, reason = SPOILED[name]
    tensors = {f"a.{part}": tensor for part, tensor in gptq(Layer.draw(24, 128, 4, 4)).items()}
    spoil(tensors)
    found = write(tmp_path, of_gptq(4), tensors)
    with pytest.raises(StartError, match=f"the quantised weight a.weight cannot be read: .*{reason}|{reason}"):
        found["a.weight"]
    with pytest.raises(KeyError):
        found["b.weight"]


def test_groups_are_of_the_size_that_is_said(tmp_path: Path) -> None:
    tensors = {f"a.{part}": tensor for part, tensor in gptq(Layer.draw(24, 192, 2, 4)).items()}
    assert write(tmp_path, of_gptq(4) | {"group_size": 96}, tensors)["a.weight"].bits == 4
    for size in (128, -1, 64):
        found = write(tmp_path, of_gptq(4) | {"group_size": size}, tensors)
        with pytest.raises(StartError, match=rf"groups of 192 inputs are not of {size}|groups of 192"):
            found["a.weight"]


@pytest.mark.parametrize(
    "said",
    [
        {"num_bits": 8, "strategy": "group", "group_size": 32},
        {"num_bits": 4, "strategy": "group", "group_size": 64},
        {"num_bits": 4, "strategy": "channel"},
        {"num_bits": 4},
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ],
    ids=str,
)
def test_a_layer_is_stored_as_one_of_the_groups_says(said: dict[str, Any], tmp_path: Path) -> None:
    """Of compressed-tensors; a group may be of other layers."""
    tensors = {f"a.{part}": tensor for part, tensor in compressed(Layer.draw(24, 128, 4, 4).symmetric()).items()}
    right = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    assert write(tmp_path, PACKED | {"config_groups": {"a": {"weights": said}, "b": right}}, tensors)["a.weight"]
    found = write(tmp_path, PACKED | {"config_groups": {"a": {"weights": said}}}, tensors)
    with pytest.raises(
        StartError, match=r"4 bits and 4 scales for the 128 inputs .* without zero points, match no group"
    ):
        found["a.weight"]


def test_a_layer_that_is_said_to_be_ordered_says_its_order(tmp_path: Path) -> None:
    tensors = {f"a.{part}": tensor for part, tensor in gptq(Layer.draw(24, 128, 4, 4)).items()}
    del tensors["a.g_idx"]
    assert write(tmp_path, of_gptq(4) | {"desc_act": False}, tensors)["a.weight"].bits == 4
    with pytest.raises(StartError, match=r"there is no a\.g_idx"):
        _ = write(tmp_path, of_gptq(4) | {"desc_act": True}, tensors)["a.weight"]


def test_packed_numbers_of_another_number_of_bits_are_refused(tmp_path: Path) -> None:
    tensors = compressed(Layer.draw(24, 128, 4, 4)) | {"weight_shape": torch.tensor([24, 256])}
    found = write(tmp_path, PACKED, {f"a.{part}": tensor for part, tensor in tensors.items()})
    with pytest.raises(StartError, match="words do not hold"):
        found["a.weight"]


def test_zero_points_that_are_no_words_of_outputs_are_refused(tmp_path: Path) -> None:
    tensors = compressed(Layer.draw(24, 128, 4, 4)) | {"weight_zero_point": torch.zeros(24, 4, dtype=torch.int32)}
    found = write(tmp_path, PACKED, {f"a.{part}": tensor for part, tensor in tensors.items()})
    with pytest.raises(StartError, match=r"\[24, 4\] words do not hold zero points of 24 outputs"):
        found["a.weight"]


def test_a_family_with_transposed_layers_is_refused(tmp_path: Path) -> None:
    """GPTQ stores those of GPT-2 the other way around, and a square one would be taken as it is."""
    sizes = {"vocab_size": 259, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.0.attn.c_proj.weight"]
    parts = gptq(Layer.draw(64, 64, 2, 4))
    tensors |= {f"transformer.h.0.attn.c_proj.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": of_gptq(4)}))
    with pytest.raises(StartError, match="weights of gpt2 that are stored quantised are not read"):
        load_worker(worker_settings(tmp_path, dtype="float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_of_another_size_than_its_network_has_is_refused(dtype: str, plain: Path, tmp_path: Path) -> None:
    stored, _ = quantise(plain, tmp_path, "awq")
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(StartError, match=r"weight.* is \[128, 64\] where .*\[96, 64\]"):
        load_worker(worker_settings(stored, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_multiplied_cannot_be_stored_so(dtype: str, plain: Path, tmp_path: Path) -> None:
    stored, _ = quantise(plain, tmp_path, "awq")
    tensors = load_file(stored / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors |= {f"model.norm.{part}": tensor for part, tensor in awq(Layer.draw(8, 64, 1, 4)).items()}
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(StartError, match=r"weight model\.norm\.weight is \[8, 64\] where config\.json asks for \[64\]"):
        load_worker(worker_settings(stored, dtype=dtype))


def test_an_embedding_may_be_stored_so_and_be_the_head(plain: Path, tmp_path: Path) -> None:
    stored, _ = quantise(plain, tmp_path, "gptq, 4 bits")
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "vocab_size": 264}))
    tensors = load_file(stored / "model.safetensors")
    del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    layer = Layer.draw(264, 64, 2, 4)
    save_file(tensors | {"model.embed_tokens.weight": layer.weight}, tmp_path / "wide.safetensors")
    quantised = {f"model.embed_tokens.{part}": tensor for part, tensor in gptq(layer).items()}
    save_file(tensors | quantised, stored / "model.safetensors")
    found = [prompt_logprobs(worker_settings(stored, dtype=dtype)) for dtype in ("float32", "bfloat16")]
    (tmp_path / "wide.safetensors").replace(stored / "model.safetensors")
    exact = prompt_logprobs(worker_settings(stored, dtype="float32"))
    assert torch.equal(found[0], exact)
    assert (found[1] - exact).abs().mean() < 0.2 * exact.std()


def test_scales_of_something_else_are_refused(plain: Path, tmp_path: Path) -> None:
    """AWQ has scales of activations for some families, without which outputs would be wrong."""
    stored, _ = quantise(plain, tmp_path, "awq")
    tensors = load_file(stored / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.act.scales": torch.ones(128)}, stored / "model.safetensors")
    with pytest.raises(StartError, match=r"mlp\.act\.scales is a scale, but not of a quantised layer"):
        load_worker(worker_settings(stored))


def test_stored_weights_are_not_quantised_a_second_time(plain: Path, tmp_path: Path) -> None:
    stored, _ = quantise(plain, tmp_path, "awq")
    with pytest.raises(StartError, match=r"--quantization int4: the weights of .* are already quantised"):
        load_worker(worker_settings(stored, "int4"))


@pytest.mark.parametrize("group", ["WEIGHT_GROUP", "W8A8_GROUP"])
def test_a_worker_that_rounds_inputs_otherwise_has_another_fingerprint(
    group: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_pack(torch.device("cpu"), torch.bfloat16, "int4"):
        pytest.skip("the CPU's kernels are not compiled")
    stored, _ = quantise(plain, tmp_path, "int8")
    fingerprint = load_worker(worker_settings(stored)).info.model_fingerprint
    assert load_worker(worker_settings(stored)).info.model_fingerprint == fingerprint
    monkeypatch.setattr(f"worker_service.execution.startup.network.{group}", 256)
    assert load_worker(worker_settings(stored)).info.model_fingerprint != fingerprint
