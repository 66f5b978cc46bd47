"""A network with experts behind both services: requests together, with too few blocks and guesses, and each alone."""

import asyncio
import json
from collections.abc import Iterator

import pytest
import torch

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from worker_service.models.layers.linear import can_pack

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 7,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its blocks hold two and a half of the requests, so that others are preempted."""
    if not can_pack(torch.device("cpu"), torch.bfloat16, "int4"):
        pytest.skip("the CPU's kernels are not compiled")
    path = tmp_path_factory.mktemp("experts")
    (path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--load-format", "dummy", "--threads", "1", "--swap-space", "0", "--device", "cpu"]
    arguments += ["--block-size", "4", "--num-gpu-blocks-override", "32", "--speculative-config", '{"method": "ngram"}']
    with LocalServer(str(path), worker_arguments=arguments) as server:
        yield server.target


async def test_requests_together_say_what_each_says_alone(target: str) -> None:
    prompts = [[number, 3, 50, number, 3, 50, number] for number in range(10, 18)]
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=number % 2, seed=number)
        for number in range(len(prompts))
    ]
    async with Client(target) as client:
        alone = [await collect(client, prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]
        together = await asyncio.gather(
            *(collect(client, prompt, one) for prompt, one in zip(prompts, sampling, strict=True))
        )
    assert sum(answer.metrics.num_recompute_preemptions for answer in together) > 0
    expected = [list(answer.outputs[0].token_ids) for answer in alone]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    assert [list(answer.outputs[0].token_ids) for answer in together] == expected
