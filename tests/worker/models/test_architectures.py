"""Every family of networks against transformers in float32, whole and cut into steps in the ways that a scheduler may.

The weights are random and large, biases and norms among them; contexts are longer than the sliding windows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from native_networks import NATIVE, WINDOWS
from stepped_worker import PROMPT, Oracle, SteppedWorker, generate_with_everything, load_runner, make_nan
from test_layers_with_states import FAMILIES as WITH_STATES
from worker_helpers import embeddings_item

from worker_service.execution.steps.model_runner import ModelRunner

BORROWED: dict[str, dict[str, Any]] = {
    "bart's decoder": {
        "model_type": "bart",
        "is_encoder_decoder": False,
        "is_decoder": True,
        "d_model": 60,
        "decoder_layers": 2,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 100,
    },
    "bert as a decoder": {"model_type": "bert", "hidden_size": 60, "is_decoder": True},
    "bloom": {"model_type": "bloom", "hidden_size": 60},
    "cohere": {"model_type": "cohere", "logit_scale": 0.3},
    "cohere2": {"model_type": "cohere2", "layer_types": WINDOWS, "sliding_window": 8, "logit_scale": 0.3},
    "ernie4_5": {"model_type": "ernie4_5"},
    "exaone4": {"model_type": "exaone4", "layer_types": WINDOWS, "sliding_window": 8},
    "glm4": {
        "model_type": "glm4",
        "partial_rotary_factor": 0.4,  # transformers 5.17 writes it beside the parameters of positions
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.4},
    },
    "gpt2": {"model_type": "gpt2", "hidden_size": 60},
    "gptj": {"model_type": "gptj", "hidden_size": 60, "rotary_dim": 4},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 60},
    "gemma3n_text, two caches for four layers": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 120,
        "laurel_rank": 5,
        "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.0],
        "rms_norm_eps": 0.01,
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
    },
    "mimo_v2_flash, heads of two numbers": {
        "model_type": "mimo_v2_flash",
        "layer_types": WINDOWS,
        "sliding_window": 8,
        "v_head_dim": 6,
        "num_key_value_heads": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo2, dynamic rope": {
        "model_type": "olmo2",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    },
    "olmoe": {"model_type": "olmoe", "hidden_size": 60, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"model_type": "opt", "hidden_size": 60, "word_embed_proj_dim": 60, "ffn_dim": 100},
    "phi": {
        "model_type": "phi",
        "hidden_size": 60,
        "partial_rotary_factor": 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.4},
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "vaultgemma": {
        "model_type": "vaultgemma",
        "layer_types": WINDOWS,
        "sliding_window": 8,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    },
    "stablelm": {"model_type": "stablelm", "hidden_size": 60},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 8},
}
MODELS = NATIVE | BORROWED | WITH_STATES


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Path:
    if request.param == "opt" and transformers.__version__ < "5.23":
        pytest.skip("before 5.23, at least in 5.17, transformers' OPT reads a number from a tensor without memory")
    return make_checkpoint(**MODELS[request.param])


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def greedy(oracle: Oracle) -> list[int]:
    return oracle.greedy(PROMPT, 14)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return load_runner(checkpoint)


@pytest.fixture
def worker(runner: ModelRunner) -> SteppedWorker:
    """A new session, over blocks that no test has filled."""
    for pool in (runner.cache_engine.device_blocks, runner.cache_engine.host_blocks):
        make_nan(pool)
    return SteppedWorker(runner)


@pytest.mark.parametrize("chunk_lens", [[36], [5, 1, 17, 13]])
def test_logits_match_transformers(chunk_lens: list[int], worker: SteppedWorker, oracle: Oracle) -> None:
    expected = oracle.logprobs(PROMPT)[:-1]
    torch.testing.assert_close(worker.prompt_logprobs(chunk_lens), expected, atol=1e-4, rtol=1e-4)


def test_embeddings_in_place_of_tokens_match_transformers(
    worker: SteppedWorker, oracle: Oracle, request: pytest.FixtureRequest
) -> None:
    """Also where the network scales embeddings. Networks whose layers read token ids, too, take none."""
    embeddings = oracle.embed(PROMPT).clone()
    embeddings[6:12] = torch.randn(6, embeddings.shape[1])
    items = (embeddings_item(embeddings[4:12], 4), embeddings_item(embeddings[20:37], 20))
    reads_ids = MODELS[request.node.callspec.params["checkpoint"]].get("hidden_size_per_layer_input")
    assert worker.runner.model.prompt_embeds_size == (0 if reads_ids else embeddings.shape[1])
    if reads_ids:
        return
    found, expected = worker.prompt_logprobs([8, 3, 16, 9], items), oracle.logprobs_behind(embeddings)[:-1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_tokens_match_transformers_through_chunks_batches_preemption_and_swapping(
    worker: SteppedWorker, oracle: Oracle, greedy: list[int]
) -> None:
    assert len(set(greedy)) > 1
    beside = oracle.greedy(PROMPT[:20], 4)
    assert generate_with_everything(worker, len(greedy)) == (greedy, beside)
