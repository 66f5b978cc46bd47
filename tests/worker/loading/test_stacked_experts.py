"""gpt-oss's experts are read expert by expert, in MXFP4 too, and anything else in their place is refused."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepped_worker import DEVICE, PROMPT, Oracle, SteppedWorker, load_runner
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from worker_helpers import LIMITS, new_sequence

from kernels.linear.mx_float4 import widened
from kernels.ops import MxFloat4Weight
from pagewire_common.start_error import StartError
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.startup.network import Network
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.shard import Shard
from worker_service.models.layers.linear import can_pack
from worker_service.models.registry import read_config
from worker_service.parallel.ranks import ALONE, Ranks
from worker_service.settings import WorkerSettings

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def plain(make_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint whose experts are widened from random MXFP4."""
    path = make_checkpoint(model_type="gpt_oss", **SIZES)
    tensors = load_file(path / "model.safetensors")
    for name in filter(is_stack, tensors):
        tensors[name] = torch.stack(
            [widened(of_expert(*one)).T for one in zip(*stored(name, tensors[name]), strict=True)]
        )
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


@pytest.fixture
def packed(plain: Path, tmp_path: Path) -> Path:
    """The same weights, as gpt-oss stores them."""
    tensors = load_file(plain / "model.safetensors")
    for name in [*filter(is_stack, tensors)]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = stored(name, tensors.pop(name))
    for file in plain.glob("*.json"):
        shutil.copy(file, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return tmp_path


def is_stack(name: str) -> bool:
    return "experts" in name and name.endswith("_proj")


def stored(name: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a weight, the same for the same name."""
    experts, inputs, outputs = like.shape
    generator = torch.Generator().manual_seed(len(name) + inputs)
    sizes = (experts, outputs, inputs // 32)
    blocks = torch.randint(256, (*sizes, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 126, sizes, generator=generator, dtype=torch.uint8)


def of_expert(blocks: Tensor, scales: Tensor) -> MxFloat4Weight:
    return MxFloat4Weight(torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1), scales)


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def network(path: Path, ranks: Ranks = ALONE, **settings: Any) -> Network:
    return Network.open(str(path), WorkerSettings(model=str(path), device="cpu", **settings), CPU, ranks)


def test_numbers_are_those_of_transformers(packed: Path) -> None:
    tensors = load_file(packed / "model.safetensors")
    expected = convert_moe_packed_tensors(tensors[f"{GATE_UP}_blocks"], tensors[f"{GATE_UP}_scales"])
    weights = Checkpoint(packed).packed
    assert weights is not None
    assert len(weights) == len([*weights]) == 3 * 2 * 4
    for number in range(4):
        weight = weights[GATE_UP.replace("experts.", f"experts.{number}.") + ".weight"]
        assert torch.equal(widened(weight).T.bfloat16(), expected[number])


def test_a_worker_in_float32_computes_with_the_widened_experts(plain: Path, packed: Path) -> None:
    expected = Oracle(plain).logprobs(PROMPT)[:-1]
    found = SteppedWorker(load_runner(packed)).prompt_logprobs([len(PROMPT)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_load_their_parts_of_experts(rank: int, packed: Path) -> None:
    checkpoint = Checkpoint(packed)
    config = read_config(checkpoint.config)
    assert isinstance(config, DecoderConfig)
    whole, part = (Decoder(config, torch.float32, CPU, ranks).checkpoint_tensors() for ranks in (ALONE, Ranks(rank, 2)))
    cuts = Shard.of(config, rank, 2).cuts(config)
    checkpoint.load_into(whole)
    checkpoint.load_into(part, cuts)
    for name, place in part.items():
        assert torch.equal(place, cuts[name].of(whole[name]) if name in cuts else whole[name]), name


@pytest.mark.parametrize("size", [24, 16], ids=["", "as wide as the hidden state"])
def test_experts_with_outputs_before_inputs_are_told_by_both_stacks_of_a_layer(size: int, tmp_path: Path) -> None:
    """Published files of Qwen3-VL have inputs first, and those of transformers 5 outputs."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
    experts = "model.language_model.layers.0.mlp.experts"
    stacks = {f"{experts}.gate_up_proj": torch.randn(2, 2 * size, 32), f"{experts}.down_proj": torch.randn(2, 32, size)}
    for turns in (False, True):
        stored = {name: stack.mT.contiguous() if turns else stack for name, stack in stacks.items()}
        save_file(stored, tmp_path / "model.safetensors")
        places = {
            f"model.layers.0.mlp.experts.{number}.{name.rpartition('.')[2]}.weight": torch.empty(stack.shape[1:])
            for name, stack in stacks.items()
            for number in range(2)
        }
        Checkpoint(tmp_path).load_into(places)
        for place, expected in zip(places.values(), [each for stack in stacks.values() for each in stack], strict=True):
            assert torch.equal(place, expected)


def said_by(path: Path, chunk_lens: list[int]) -> list[int]:
    opened = network(path, dtype="bfloat16", block_size=LIMITS.block_size)
    cache = CacheEngine(opened.shape, LIMITS.num_device_blocks, 0, CPU)
    stepped = SteppedWorker(ModelRunner(opened.load()[0], cache))
    new: Mapping[str, Any] = {"new_sequences": (new_sequence(1, PROMPT, range(16)),)}
    for chunk_len in chunk_lens:
        first = stepped.step((1, chunk_len, chunk_len == chunk_lens[-1]), **new).token_ids
        new = {}
    return [*first, *stepped.generate(1, 12)]


def test_in_bf16_packed_experts_say_what_widened_ones_say_in_less_memory(plain: Path, packed: Path) -> None:
    """To the bit: chunks of other sizes are other numbers of rows of each expert."""
    if not can_pack(CPU, torch.bfloat16, "gguf"):
        pytest.skip("this needs the CPU's compiled kernels")
    expected = said_by(plain, [len(PROMPT)])
    assert len(set(expected)) > 1
    assert said_by(packed, [len(PROMPT)]) == said_by(packed, [30, 1, 6]) == expected
    in_experts = 3 * 4 * 3 * 64 * 96
    sizes = [sum(network(path, dtype="bfloat16").check()) for path in (plain, packed)]
    assert sizes[0] - sizes[1] == pytest.approx(in_experts * (2 - 4.25 / 8), rel=0.01)


def test_what_is_to_be_dequantised_is(packed: Path) -> None:
    change_config(packed, quantization_config={"quant_method": "mxfp4", "dequantize": True})
    assert Checkpoint(packed).packed is None
    if not can_pack(DEVICE, torch.bfloat16, "int8"):
        pytest.skip("--quantization int8 needs kernels that are missing here")
    network(packed, dtype="bfloat16", quantization="int8").check()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(f"{GATE_UP}_scales"), r"lack the tensor .*gate_up_proj_scales of U8"),
        (lambda tensors: tensors[f"{GATE_UP}_scales"].fill_(255), r"a scale in .*_scales is not a number"),
        (
            lambda tensors: tensors.update({f"{GATE_UP}_blocks": tensors[f"{GATE_UP}_blocks"][:, :, :1].clone()}),
            r"gate_up_proj_blocks is \[4, 192, 1, 16\]",
        ),
        (
            lambda tensors: tensors.update({f"{GATE_UP}_bias": torch.zeros(5, 192)}),
            r"gate_up_proj_bias is \[5, 192\] of F32 where config.json asks for \[4, 192\]",
        ),
        (lambda tensors: tensors.update({f"{GATE_UP}_other": torch.ones(3)}), "does not use.*gate_up_proj_other"),
    ],
    ids=["no scales", "a scale that is no number", "too few groups", "too many experts", "one more"],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], sentence: str, packed: Path
) -> None:
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(StartError, match=sentence):
        load_runner(packed)


def test_what_is_not_supported_is_refused(packed: Path) -> None:
    with pytest.raises(StartError, match=r"--quantization int8: the weights of .* are already quantised"):
        network(packed, dtype="bfloat16", quantization="int8").check()
    with pytest.raises(StartError, match="weights that are stored quantised cannot be cut"):
        network(packed, Ranks(0, 2), dtype="bfloat16").check()
    change_config(packed, quantization_config={"quant_method": "mxfp4", "group_size": 16})
    with pytest.raises(StartError, match="quantization_config: it says group_size = 16, which is not supported"):
        load_runner(packed)
