"""Networks in bfloat16 against transformers in float32 with the same weights: where sums are rounded, and where not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from transformers import AutoModelForCausalLM

NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 20},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 20},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2},
}
COMMON_TO_ALL_TOKENS = 3.0
"""Added to every weight that makes logits: they are then 20 in size and near to each other, as in trained networks."""


@pytest.fixture(scope="module")
def make_rounded(make_checkpoint: Callable[..., Path], tmp_path_factory: Any) -> Callable[..., Path]:
    """As `make_checkpoint`, with weights that bfloat16 holds."""

    def make(add_to_head: float = 0.0, **config: Any) -> Path:
        model = AutoModelForCausalLM.from_pretrained(make_checkpoint(**config), dtype=torch.float32)
        if add_to_head:
            model.get_output_embeddings().weight.data += add_to_head
        path: Path = tmp_path_factory.mktemp("rounded")
        model.bfloat16().save_pretrained(path)
        return path

    return make


def errors(checkpoint: Path) -> tuple[float, float]:
    """The mean error of log-probabilities in bfloat16: ours and that of transformers."""
    exact = Oracle(checkpoint).logprobs(PROMPT)[:-1]
    theirs = Oracle(checkpoint, torch.bfloat16).logprobs(PROMPT)[:-1]
    ours = SteppedWorker(load_runner(checkpoint, dtype=torch.bfloat16)).prompt_logprobs([30, 1, 6])
    return float((ours - exact).abs().mean()), float((theirs - exact).abs().mean())


@pytest.mark.parametrize("network", NATIVE)
def test_log_probabilities_are_nearer_to_float32_than_those_of_transformers(
    network: str, make_rounded: Callable[..., Path]
) -> None:
    ours, theirs = errors(make_rounded(**NATIVE[network]))
    assert 0 < ours < 0.8 * theirs


@pytest.mark.parametrize("model_type", ["llama", "starcoder2"])
def test_large_logits_keep_their_differences(model_type: str, make_rounded: Callable[..., Path]) -> None:
    """The second network runs in transformers' own code, except for the product that makes logits."""
    checkpoint = make_rounded(COMMON_TO_ALL_TOKENS, model_type=model_type, tie_word_embeddings=False)
    ours, theirs = errors(checkpoint)
    assert 0 < ours < 0.7 * theirs
