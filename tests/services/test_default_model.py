"""The default model, from the start of its services to its words and tokens.

That tokens are those of transformers whatever the scheduler does, test_equal_to_transformers.py shows of a smaller one.
"""

import asyncio

import pytest
from prompts import PROMPTS
from transformers_oracle import likeliest_tokens

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from pagewire_common.settings import load_settings
from worker_service.loading.model_store import find_model
from worker_service.settings import WorkerSettings

SOME = PROMPTS[1:30:4]
"""Of every kind; the longest takes some 200 tokens."""
NUM_TOKENS = 16


@pytest.mark.usefixtures("true_starts")
async def test_in_bfloat16_it_knows_the_capital_of_france() -> None:
    """Logits that are rounded to bfloat16 tie, and the lowest of equals starts with "L'Étoile, la Marseillaise"."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with LocalServer(worker_arguments=["--dtype", "bfloat16"]) as server:
        async with Client(server.target) as client:
            completion = await collect(client, messages, SamplingParams(max_tokens=32, temperature=0))
    assert "Paris" in completion.outputs[0].text


async def test_concurrent_greedy_outputs_in_float32_equal_transformers() -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LocalServer(worker_arguments=["--dtype", "float32"]) as server:
        async with Client(server.target) as client:
            completions = await asyncio.gather(*(collect(client, prompt, sampling) for prompt in SOME))
    outputs = [completion.outputs[0].token_ids for completion in completions]
    assert all(len(tokens) == NUM_TOKENS for tokens in outputs)
    directory = find_model("default", load_settings(WorkerSettings, "tests", []).cache.expanduser()).path
    assert outputs == likeliest_tokens(directory, SOME, outputs)
