"""Latent attention: what its cache holds, which layers a checkpoint may have beside it, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import structlog
import torch
from fake_decode_graphs import FakeGraphs, with_fake_graphs
from native_networks import NATIVE
from prompt_scores import prompt_logprobs, worker_settings
from safetensors.torch import load_file, save_file
from slow_heads import SlowEagle, write_head
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from torch import Tensor
from worker_helpers import LIMITS, new_sequence, state, tokens

from kernels import reference
from kernels.ops import Ops
from pagewire_common.start_error import StartError
from worker_service.execution.drafting.draft_model import DraftModel
from worker_service.execution.startup.network import Network
from worker_service.execution.worker import load_worker
from worker_service.models.layers.latent_up import LatentUp, WithoutLatentUp
from worker_service.parallel.ranks import ALONE
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import SchedulerOutput
from worker_service.speculation.drafter import Beginning


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


def test_latents_are_refused_in_8_bits(checkpoint: Path) -> None:
    settings = worker_settings(checkpoint, kv_cache_dtype="int8")
    network = Network.open(str(checkpoint), settings, torch.device("cpu"), ALONE)
    with pytest.raises(StartError, match="in 8 bits its latents would share a scale with the rotated elements"):
        network.check()


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_heads_multiplied_together_give_the_products_of_heads_multiplied_one_by_one(num_tokens: int) -> None:
    together = SimpleNamespace(**vars(reference) | {"GROUPED_PRODUCTS": True})
    found = []
    for ops in (reference, together):
        up = LatentUp(3, (10, 14), 16, torch.float32, torch.device("cpu"), cast(Ops, ops))
        up.weight.copy_(torch.randn(3 * 24, 16, generator=torch.Generator().manual_seed(1)))
        up.pack()
        # Queries lie beside their rotated elements.
        queries, attended = (torch.linspace(-1, 1, num_tokens * 48).view(-1, 3, 16)[..., :size] for size in (10, 16))
        found.append((up.queries(queries), up.values(attended)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.usefixtures("interpreted")
def test_the_kernels_of_gpus_say_what_transformers_says(make_checkpoint: Callable[..., Path]) -> None:
    """A prompt in chunks beside a decode, and then both in graphs with a padding row."""
    path = make_checkpoint(**NATIVE["deepseek_v3, groups"] | {"num_hidden_layers": 1, "first_k_dense_replace": 0})
    slow, record = Oracle(path), FakeGraphs()
    worker = SteppedWorker(with_fake_graphs(load_runner(path, graphs=False), LIMITS, record=record))
    short = PROMPT[:5]
    news = (
        new_sequence(1, PROMPT, range(13)),
        new_sequence(2, short, range(20, 24)),
        new_sequence(3, [3], range(30, 33)),
    )
    steps = [worker.step((1, 30, False), (2, 5, True), new_sequences=news[:2])]
    steps.append(worker.step((1, 7, True), (2, 1, True), (3, 1, True), new_sequences=news[2:]))
    steps += [worker.step((1, 1, True), (2, 1, True), (3, 1, True)) for _ in range(2)]
    assert record.replayed[-2:] == [4, 4]
    assert [step.token_ids[-3] for step in steps[1:]] == slow.greedy(PROMPT, 3)
    assert [step.token_ids[-2 if index else -1] for index, step in enumerate(steps)] == slow.greedy(short, 4)
    assert [step.token_ids[-1] for step in steps[1:]] == slow.greedy([3], 3)


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
    with_one = changed(checkpoint, tmp_path / "one", behind | tensors, num_nextn_predict_layers=1)
    settings = worker_settings(with_one, dtype="float32")
    with structlog.testing.capture_logs() as logs:
        found = prompt_logprobs(settings)
    assert torch.equal(found, prompt_logprobs(worker_settings(checkpoint, dtype="float32")))
    number = sum(name.startswith("model.layers.3.") for name in behind)
    said = [entry for entry in logs if entry["event"] == "the network does not use all tensors of the checkpoint"]
    assert [(entry["number"], entry["first"][:15]) for entry in said] == [(number, "model.layers.3.")]
    none = changed(checkpoint, tmp_path / "none", behind | tensors, num_nextn_predict_layers=0)
    silent = changed(checkpoint, tmp_path / "silent", behind | tensors)
    words = json.loads((silent / "config.json").read_text())
    words = {name: value for name, value in words.items() if name not in ("num_mtp_layers", "num_nextn_predict_layers")}
    (silent / "config.json").write_text(json.dumps(words))
    for path in (none, silent):
        with pytest.raises(StartError, match=r"the network of config\.json does not use: model\.layers\.3\."):
            Network.open(str(path), worker_settings(path), torch.device("cpu"), ALONE).check()


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
