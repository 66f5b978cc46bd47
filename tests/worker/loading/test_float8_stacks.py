"""Mistral 4 in the layout that others report of its published file: in a whole with a network for images, in fp8, with
experts in stacks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from native_networks import NATIVE
from prompt_scores import prompt_logprobs, worker_settings
from safetensors.torch import load_file, save_file
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.execution.startup.network import Network
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.registry import read_config
from worker_service.parallel.ranks import ALONE

FP8 = {
    "quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
    "modules_to_not_convert": ["vision_tower", "multi_modal_projector", "lm_head"],
}  # fmt: skip
GATE_UP = "language_model.model.layers.1.mlp.experts.gate_up_proj"


class Folders(NamedTuple):
    published: Path
    meant: Path
    """The text network in float32, with the values that the fp8 tensors mean."""


@pytest.fixture(scope="module")
def folders(make_checkpoint: Callable[..., Path]) -> Folders:
    meant = make_checkpoint(**NATIVE["mistral4, groups"])
    stored, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(meant / "model.safetensors").items():
        whole = f"language_model.{name}"
        stored[whole] = values[name] = tensor
        layer, _, part = whole.rpartition(".")
        if layer.endswith(".experts"):
            scale = tensor.abs().amax((1, 2), keepdim=True) / 448
            scales = {f"{whole}_scale_inv": scale, f"{whole}_activation_scale": torch.full((len(tensor),), 0.1)}
        elif part == "weight" and layer.endswith("_proj"):
            scale = tensor.abs().max() / 448
            scales = {f"{layer}.weight_scale_inv": scale, f"{layer}.activation_scale": torch.tensor(0.1)}
        else:
            continue
        stored[whole] = (tensor / scale).to(torch.float8_e4m3fn)
        values[name] = stored[whole].float() * scale
        stored |= scales
    stored["vision_tower.patch_conv.weight"] = torch.ones(3)
    save_file(values, meant / "model.safetensors")
    published = meant.with_name("published")
    published.mkdir()
    save_file(stored, published / "model.safetensors")
    (published / "tokenizer.json").write_bytes((meant / "tokenizer.json").read_bytes())
    text = json.loads((meant / "config.json").read_text())
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
        "text_config": text, "vision_config": {"model_type": "pixtral"}, "tie_word_embeddings": False,
        "quantization_config": FP8,
    }  # fmt: skip
    (published / "config.json").write_text(json.dumps(whole))
    return Folders(published, meant)


def test_a_published_file_computes_what_its_fp8_tensors_mean(folders: Folders) -> None:
    expected = Oracle(folders.meant).logprobs(PROMPT)[:-1]
    found = SteppedWorker(load_runner(folders.published)).prompt_logprobs([30, 7])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_worker_that_rounds_inputs_computes_nearly_what_they_mean(folders: Folders) -> None:
    """Numbers of 8 bits have three digits after the first; without rounding, the error is 3% in bfloat16."""
    network = Network.open(str(folders.published), worker_settings(folders.published), torch.device("cpu"), ALONE)
    network.check()
    assert network.config.num_kv_heads == 1
    expected = prompt_logprobs(worker_settings(folders.meant, dtype="float32"))
    error = (prompt_logprobs(worker_settings(folders.published)) - expected).abs().mean()
    assert error < 0.15 * expected.std()


def test_every_expert_has_the_scales_of_its_stack(folders: Folders) -> None:
    packed, stored = Checkpoint(folders.published).packed, load_file(folders.published / "model.safetensors")
    assert packed is not None
    assert packed.schemes == {"fp8"}
    assert packed.stores_input_scales
    name = "model.layers.1.mlp.experts.5.gate_up_proj.weight"
    weight: Any = packed[name]
    assert torch.equal(weight.numbers.view(torch.uint8), stored[GATE_UP][5].view(torch.uint8))
    assert torch.equal(weight.scales, stored[f"{GATE_UP}_scale_inv"][5].expand_as(weight.scales))
    assert weight.input_scale == stored[f"{GATE_UP}_activation_scale"][5]
    assert f"language_model.{name}" in [*packed]


def test_the_text_network_may_say_how_it_is_quantised(folders: Folders, tmp_path: Path) -> None:
    """As in the files of Kimi K2.5."""
    whole = json.loads((folders.published / "config.json").read_text())
    whole["text_config"]["quantization_config"] = whole.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "model.safetensors").symlink_to(folders.published / "model.safetensors")
    found, known = Checkpoint(tmp_path), Checkpoint(folders.published)
    assert found.quantization == known.quantization == FP8
    assert read_config(found.config).ignored_tensors == read_config(known.config).ignored_tensors


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("_scale_inv", "there is no .*gate_up_proj_scale_inv"), ("_activation_scale", "there is no .*_activation_scale")],
)
def test_a_stack_without_scales_is_refused(missing: str, reason: str, folders: Folders, tmp_path: Path) -> None:
    tensors = load_file(folders.published / "model.safetensors")
    del tensors[GATE_UP + missing]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders.published / "config.json").read_bytes())
    with pytest.raises(StartError, match=reason):
        load_runner(tmp_path)
