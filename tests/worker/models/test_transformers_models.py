"""Networks that run in transformers' own code: which are refused and why, and how their weights come in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from tiny_networks import randomize, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.registry import build_model, read_config
from worker_service.settings import WorkerSettings

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 131}


@pytest.fixture(scope="module")
def starcoder(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(model_type="starcoder2", sliding_window=8)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "elephant"}, "transformers does not know it"),
        ({}, "a model of no stated type is not supported"),
        ({"model_type": "olmo2", "hidden_size": "many"}, "it describes no model olmo2: .*hidden_size"),
        ({"model_type": "vit"}, "transformers' AutoModelForCausalLM has no network of this type"),
        ({"model_type": "mistral3"}, "its text_config is missing, or its architectures are of another network"),
        ({"model_type": "mistral_large4"}, "it reads images or sounds, and the text network of its type"),
        ({"model_type": "marian"}, "supported encoder-decoders are bart, t5 and whisper"),
        ({"model_type": "mt5"}, "supported encoder-decoders are bart, t5 and whisper"),
        ({"model_type": "electra"}, "it is made to fill gaps in text"),
        ({"model_type": "recurrent_gemma"}, "it keeps states of a kind that is not supported"),
        ({"model_type": "rwkv"}, "it keeps states of a kind that is not supported"),
        ({"model_type": "cpmant"}, "its attention is computed by code of its own: a bias of the shape"),
        (
            {"model_type": "exaone4", "per_layer_config": {"1": {"sliding_window": 9}}},
            "exaone4 is not supported: 'sliding_window' is a per-layer attribute and may vary across layers",
        ),
        (
            {"model_type": "deepseek_v4"},
            "deepseek_v4 is not supported: it has layers of type heavily_compressed_attention",
        ),
        ({"model_type": "deepseek_v32"}, "deepseek_v32 is not supported: it has layers of type indexed_attention"),
        ({"model_type": "glm_moe_dsa"}, "glm_moe_dsa is not supported: it has layers of type indexed_attention"),
        ({"model_type": "bert-generation"}, "its tokens attend to later tokens"),
        ({"model_type": "doge"}, "its attention has a mask of its own making"),
    ],
)
def test_networks_that_cannot_run_are_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_config(SMALL | config)


def test_layers_that_read_the_keys_of_others_have_no_cache_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 9}
    config = read_config(SMALL | sizes | {
        "model_type": "gemma3n_text", "num_hidden_layers": 5, "layer_types": kinds, "num_kv_shared_layers": 2,
        "intermediate_size": 32, "hidden_size_per_layer_input": 4, "laurel_rank": 2,
        "activation_sparsity_pattern": [0.0] * 5,
    })  # fmt: skip
    assert (config.num_layers, config.windows, config.needs.readers) == (3, (9, None, 9), (0, 1, 2, 1, 2))


def check_log_probabilities(network: Any, path: Path) -> None:
    """Compare a network of random weights with its checkpoint, in chunks."""
    randomize(network)
    network.save_pretrained(path)
    with torch.inference_mode():
        expected = network(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    found = SteppedWorker(load_runner(path)).prompt_logprobs([5, 1, 17, 13])
    torch.testing.assert_close(found, expected[:-1], atol=1e-4, rtol=1e-4)


def test_a_file_of_all_parts_of_a_multimodal_network_computes_text(tmp_path: Path) -> None:
    config = tiny_config("llama4")
    config.text_config.for_llm_compressor = False  # a key of published files
    torch.manual_seed(0)
    network = AutoModelForImageTextToText.from_config(config).eval()
    check_log_probabilities(network, tmp_path)


@pytest.mark.parametrize(
    ("family", "layers"),
    [("bamba", {"attn_layer_indices": [0, 1, 2, 3]}), ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0})],
)
def test_code_of_layers_with_states_runs_with_attention_alone(
    family: str, layers: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config(family)
    for name, value in layers.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    check_log_probabilities(network, tmp_path)


def test_longrope_ends_where_its_frequencies_would_change() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.0, "long_mscale": 1.0}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64, **factors}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    assert read_config(SMALL | sizes | {"model_type": "phimoe", "rope_parameters": rope}).max_model_len == 64


def test_code_and_files_that_a_config_points_to_are_left_alone(starcoder: Path) -> None:
    evil = {
        "auto_map": {"AutoConfig": "evil--config.Evil", "AutoModelForCausalLM": "evil--model.Evil"},
        "_attn_implementation": "evil/kernel",
        "attn_implementation": "evil/kernel",
        "experts_implementation": "evil/kernel",
        "transformers_weights": "../evil.safetensors",
    }
    config = read_config(Checkpoint(starcoder).config | evil)
    build_model(config, torch.float32, CPU)
    assert "evil" not in str(config.network)


def test_a_tensor_that_is_missing_is_named(starcoder: Path, tmp_path: Path) -> None:
    change_tensors(starcoder, tmp_path, "model.layers.1.mlp.c_fc.weight", None)
    with pytest.raises(StartError, match=r"the weights lack the tensor model\.layers\.1\.mlp\.c_fc\.weight"):
        load_runner(tmp_path)


def test_a_tensor_of_another_shape_is_refused(starcoder: Path, tmp_path: Path) -> None:
    change_tensors(starcoder, tmp_path, "model.norm.weight", torch.ones(50))
    with pytest.raises(StartError, match=r"model\.norm\.weight is \[50\] of F32 where config.json asks for \[48\]"):
        load_runner(tmp_path)


def test_weights_take_the_type_that_was_asked_for(starcoder: Path) -> None:
    model = build_model(read_config(Checkpoint(starcoder).config), torch.bfloat16, CPU)
    assert {weight.dtype for weight in model.checkpoint_tensors().values()} == {torch.bfloat16}


def test_experts_are_filled_one_by_one_in_their_stack(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(model_type="qwen2_moe", num_experts=4, moe_intermediate_size=100)
    places = build_model(read_config(Checkpoint(path).config), torch.float32, CPU).checkpoint_tensors()
    first, second = (places[f"model.layers.0.mlp.experts.2.{name}_proj.weight"] for name in ("gate", "up"))
    assert first.shape == second.shape == (100, 48)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert set(places) == set(load_file(path / "model.safetensors"))


def test_weights_saved_without_a_head_are_found(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_checkpoint(model_type="gpt2", hidden_size=60)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    found = SteppedWorker(load_runner(tmp_path)).prompt_logprobs([len(PROMPT)])
    torch.testing.assert_close(found, Oracle(path).logprobs(PROMPT)[:-1], atol=1e-4, rtol=1e-4)


def test_random_weights_need_no_files(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_checkpoint(model_type="olmoe", hidden_size=60, num_experts=4, num_experts_per_tok=2)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    settings = WorkerSettings(model=str(tmp_path), device="cpu", load_format="dummy", num_gpu_blocks_override=8)
    worker = load_worker(settings)
    with torch.inference_mode():
        logits = worker.runner.model.compute_logits(torch.randn(3, 60))
    assert logits.isfinite().all()
    assert logits.std() > 0


def change_tensors(source: Path, target: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Copy a checkpoint with another tensor of this name, or without one."""
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors if tensor is None else tensors | {name: tensor}, target / "model.safetensors")
