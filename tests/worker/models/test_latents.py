"""Latent attention: what its cache holds, which layers a checkpoint may have beside it, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_networks import NATIVE
from prompt_scores import prompt_logprobs, worker_settings
from safetensors.torch import load_file, save_file
from slow_heads import SlowEagle, write_head
from stepped_worker import DEVICE, PROMPT, Oracle
from torch import Tensor
from worker_helpers import state, tokens

from pagewire_common.start_error import StartError
from worker_service.execution.drafting.draft_model import DraftModel
from worker_service.execution.startup.network import Network
from worker_service.execution.worker import load_worker
from worker_service.models.layers.latent_up import WithoutLatentUp
from worker_service.parallel.ranks import ALONE
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import SchedulerOutput
from worker_service.speculation.drafter import Beginning

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="GPUs have no kernels for latents")


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(**NATIVE["deepseek_v3, groups"])


def changed(source: Path, target: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    """A copy with these tensors, and other words in its config."""
    target.mkdir()
    known = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(known | config))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_token_takes_one_latent_and_its_rotated_elements_a_layer(checkpoint: Path) -> None:
    worker = load_worker(worker_settings(checkpoint, block_size=4))
    assert worker.info.block_bytes == 3 * 4 * (16 + 6) * torch.bfloat16.itemsize


def test_latents_are_refused_in_8_bits_and_on_gpus(checkpoint: Path) -> None:
    for cache, device, reason in (
        ("int8", "cpu", "has latent attention; in 8 bits its latents would share a scale with the rotated elements"),
        ("auto", "cuda", "has latent attention, which runs on CPUs only: set --device cpu"),
    ):
        settings = worker_settings(checkpoint, kv_cache_dtype=cache)
        network = Network.open(str(checkpoint), settings, torch.device(device), ALONE)
        with pytest.raises(StartError, match=reason):
            network.check()


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_network_with_latents_drafts_and_is_drafted_for(method: str, checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoint if method == "draft_model" else write_head(tmp_path / "head")
    drafts = json.dumps({"method": method, "model": str(model)})
    worker = load_worker(worker_settings(checkpoint, dtype="float32", cache=tmp_path, speculative_config=drafts))
    assert worker.drafter is not None
    proposer = worker.drafter._proposer
    assert isinstance(proposer, DraftModel)
    sequence = state(PROMPT, temperature=0.0)
    sequence.num_computed_tokens, sequence.block_ids = 0, tokens(range(9))
    chunks, step = [ScheduledChunk(sequence, 0, 30, samples=True)], SchedulerOutput(1, 1)
    proposer.step_begins(step, chunks)
    worker.runner.execute(step, chunks)
    sequence.num_computed_tokens = 30
    slow = Oracle(checkpoint) if method == "draft_model" else SlowEagle(checkpoint, model)
    assert proposer.propose([Beginning(sequence, 31, 4)]) == [slow.greedy(PROMPT[:31], 4)]


def test_layers_for_multi_token_prediction_are_left_out_if_the_config_counts_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    behind = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in tensors.items()}
    with_one = changed(checkpoint, tmp_path / "one", behind | tensors)
    settings = worker_settings(with_one, dtype="float32")
    assert torch.equal(prompt_logprobs(settings), prompt_logprobs(worker_settings(checkpoint, dtype="float32")))
    none = changed(checkpoint, tmp_path / "none", behind | tensors, num_nextn_predict_layers=0)
    with pytest.raises(StartError, match=r"tensors that the network of config\.json does not use: model\.layers\.3\."):
        Network.open(str(none), worker_settings(none), torch.device("cpu"), ALONE).check()


def test_a_checkpoint_in_fp8_is_multiplied_so_except_for_the_absorbed_projection(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Scales for blocks of weights, as DeepSeek stores them."""
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if "_proj" in name and tensor.dim() == 2 and not name.endswith("embed_tokens.weight"):
            scale = tensor.abs().max() / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.expand(1, tensor.shape[1] // 4).contiguous()
            meant[name] = stored[name].float() * scale
    config = {"quant_method": "fp8", "weight_block_size": [1000, 4], "activation_scheme": "dynamic", "fmt": "e4m3"}
    narrow = changed(checkpoint, tmp_path / "stored", stored, quantization_config=config)
    exact = changed(checkpoint, tmp_path / "meant", meant)
    network = Network.open(str(narrow), worker_settings(narrow), torch.device("cpu"), ALONE)
    found = network._quantized()
    assert isinstance(found, WithoutLatentUp)
    up = "model.layers.0.self_attn.kv_b_proj.weight"
    assert up not in found
    assert up not in [*found]
    assert len(found) == len(network.checkpoint.packed or ()) - 3
    expected = prompt_logprobs(worker_settings(exact, dtype="float32"))
    error = (prompt_logprobs(worker_settings(narrow, dtype="float32")) - expected).abs().mean()
    assert error < 0.1 * expected.std()
