"""A head that a checkpoint holds is used, whatever config.json says of tying it; and no tensor is left unread."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_networks import NATIVE
from safetensors.torch import load_file, save_file
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from test_architectures import BORROWED
from tiny_model import write_byte_tokenizer
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.registry import read_config
from worker_service.settings import WorkerSettings

Make = Callable[..., Path]
ALL = {
    name: MODEL for name, MODEL in {"llama": {"model_type": "llama"}, **NATIVE, **BORROWED}.items() if "," not in name
} | {"mixtral": NATIVE["mixtral, windows"], "qwen3_moe": NATIVE["qwen3_moe, renormalised"]}


def change(source: Path, target: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A copy with further tensors, and other words in its config."""
    shutil.copytree(source, target)
    known = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(known | config))
    save_file(load_file(source / "model.safetensors") | tensors, target / "model.safetensors")
    return target


def logprobs(path: Path) -> Tensor:
    return SteppedWorker(load_runner(path)).prompt_logprobs([len(PROMPT)])


@pytest.mark.parametrize("name", ALL)
def test_a_head_beside_tied_embeddings_is_used_as_transformers_uses_it(
    name: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    tied = make_checkpoint(**ALL[name] | {"tie_word_embeddings": True})
    names = read_config(Checkpoint(tied).config).tied
    (head,) = {"lm_head.weight", "lm_head.decoder.weight", "embed_out.weight", "cls.predictions.decoder.weight"} & set(
        names
    )
    embedding = load_file(tied / "model.safetensors")[names[head]]
    own = change(tied, tmp_path / "own", {head: torch.randn(embedding.shape, generator=torch.manual_seed(4)) * 0.2})
    expected = Oracle(own).logprobs(PROMPT)[:-1]
    assert (expected - Oracle(tied).logprobs(PROMPT)[:-1]).abs().max() > 1
    torch.testing.assert_close(logprobs(own), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])
def test_a_head_that_is_the_embedding_is_not_held_twice(family: str, make_checkpoint: Make, tmp_path: Path) -> None:
    tied = make_checkpoint(family, tie_word_embeddings=True)
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    same = change(tied, tmp_path / "same", {"lm_head.weight": embedding.clone()})
    checkpoint = Checkpoint(same)
    assert checkpoint.own(read_config(checkpoint.config).tied) == frozenset()
    torch.testing.assert_close(logprobs(same), logprobs(tied), atol=0, rtol=0)


def settings(path: Path) -> WorkerSettings:
    return WorkerSettings(model=str(path), device="cpu", dtype="float32", num_gpu_blocks_override=8)


LEFT: dict[str, tuple[str, dict[str, Tensor], str]] = {
    "a score": ("llama", {"score.weight": torch.ones(2, 48)}, "score.weight"),
    "a value head": ("llama", {"v_head.summary.weight": torch.ones(1, 48)}, "v_head.summary.weight"),
    "a bias": ("llama", {"model.layers.1.self_attn.q_proj.bias": torch.ones(60)}, "layers.1.self_attn.q_proj.bias"),
    "a bias of the head": ("mistral", {"lm_head.bias": torch.ones(131)}, "lm_head.bias"),
    "a scale": ("llama", {"model.layers.0.mlp.down_proj.weight_scale": torch.ones(1)}, "down_proj.weight_scale"),
    "factors": ("llama", {"rope_freqs.weight": torch.ones(5)}, "rope_freqs.weight"),
    "a layer more": ("llama", {"model.layers.3.mlp.up_proj.weight": torch.ones(100, 48)}, "layers.3.mlp.up_proj"),
    "a norm": ("qwen2", {"model.layers.0.self_attn.q_norm.weight": torch.ones(10)}, "self_attn.q_norm.weight"),
    "in transformers' code": ("olmo2", {"model.layers.0.mlp.up_proj.bias": torch.ones(100)}, "mlp.up_proj.bias"),
    "many": ("llama", {f"extra.{n}": torch.ones(1) for n in range(8)}, r"extra\.0, .*extra\.4 and 3 more; config"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_tensor_that_nothing_takes_is_refused_by_name(name: str, make_checkpoint: Make, tmp_path: Path) -> None:
    family, tensors, sentence = LEFT[name]
    path = change(make_checkpoint(family), tmp_path / "more", tensors)
    with pytest.raises(StartError, match=rf"the network of config\.json does not use: .*{sentence}"):
        load_worker(settings(path))


HARMLESS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "frequencies": ({"model_type": "llama"}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}),
    "a bias of GPTQ's": ({"model_type": "llama"}, {"model.layers.0.self_attn.o_proj.bias": torch.zeros(48)}),
    "masks": (
        BORROWED["gpt2"],
        {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)},
    ),
    "scales of a cache": ({"model_type": "llama"}, {"model.layers.0.self_attn.k_scale": torch.ones(1)}),
    "guessing layers": ({"model_type": "llama"}, {"model.mtp_layers.0.input_proj.weight": torch.ones(4)}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_tensors_that_change_nothing_may_be_there(name: str, make_checkpoint: Make, tmp_path: Path) -> None:
    network, tensors = HARMLESS[name]
    path = make_checkpoint(**network)
    torch.testing.assert_close(logprobs(change(path, tmp_path / "more", tensors)), logprobs(path), atol=0, rtol=0)


def test_a_classifier_with_tied_embeddings_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"vocab_size": 259, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    with pytest.raises(StartError, match="architectures names LlamaForSequenceClassification, which is not"):
        load_worker(settings(tmp_path))
    words = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(words | {"architectures": None}))
    with pytest.raises(StartError, match=r"not use: score\.weight; config\.json may be of another network"):
        load_worker(settings(tmp_path))
