"""gpt-oss's experts in MXFP4 are widened as transformers widens them, and anything else in their place is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagewire_common.start_error import StartError
from worker_service.loading.quantized.mx_float4 import widened

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def plain(make_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint whose experts are widened from random MXFP4."""
    path = make_checkpoint(model_type="gpt_oss", **SIZES)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        tensors[name] = torch.stack([widened(*expert).T for expert in zip(*stored(name, tensors[name]), strict=True)])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


@pytest.fixture
def packed(plain: Path, tmp_path: Path) -> Path:
    """The same weights, as gpt-oss stores them."""
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "experts" in name and name.endswith("_proj"):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = stored(name, tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def stored(name: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a weight, the same for the same name."""
    experts, inputs, outputs = like.shape
    generator = torch.Generator().manual_seed(len(name) + inputs)
    sizes = (experts, outputs, inputs // 32)
    blocks = torch.randint(256, (*sizes, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 126, sizes, generator=generator, dtype=torch.uint8)


def test_numbers_are_those_of_transformers() -> None:
    blocks, scales = stored("", torch.empty(3, 64, 10))
    expected = convert_moe_packed_tensors(blocks, scales)
    for expert in range(3):
        assert torch.equal(widened(blocks[expert], scales[expert]).T.bfloat16(), expected[expert])


def test_a_worker_computes_with_the_widened_experts(plain: Path, packed: Path) -> None:
    expected = Oracle(plain).logprobs(PROMPT)[:-1]
    found = SteppedWorker(load_runner(packed)).prompt_logprobs([len(PROMPT)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), r"lack the tensor .*gate_up_proj_scales of U8"),
        (lambda tensors, name: tensors[f"{name}_scales"].fill_(255), r"a scale in .*_scales is not a number"),
        (
            lambda tensors, name: tensors.update({f"{name}_blocks": tensors[f"{name}_blocks"][:, :, :1].clone()}),
            r"gate_up_proj_blocks is \[4, 192, 1, 16\]",
        ),
    ],
    ids=["no scales", "a scale that is no number", "too few groups"],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor], str], object], sentence: str, packed: Path
) -> None:
    tensors = load_file(packed / "model.safetensors")
    change(tensors, "model.layers.0.mlp.experts.gate_up_proj")
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(StartError, match=sentence):
        load_runner(packed)


def test_an_unknown_key_is_refused(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["group_size"] = 16
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match="quantization_config: it says group_size = 16, which is not supported"):
        load_runner(packed)
