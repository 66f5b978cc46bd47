"""The default model, from the start of its services to its words and tokens.

That tokens are those of transformers whatever the scheduler does, test_equal_to_transformers.py shows of a smaller one.
"""

import asyncio

import pytest
import torch
from prompts import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    assert outputs == likeliest_tokens(outputs)


def likeliest_tokens(outputs: list[list[int]]) -> list[list[int]]:
    """The likeliest token by transformers in float32 after each prompt, and after each token of the server's output.

    If these are the output itself, transformers generates the same: after equal tokens the same token is likeliest. One
    pass for each prompt takes a tenth of the time of generating.
    """
    directory = find_model("default", load_settings(WorkerSettings, "tests", []).cache.expanduser()).path
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    likeliest = []
    for prompt, output in zip(SOME, outputs, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(
                torch.cat([tokens, torch.tensor([output[:-1]])], dim=1), logits_to_keep=NUM_TOKENS, use_cache=False
            ).logits
        likeliest.append(logits[0].argmax(dim=-1).tolist())
    return likeliest
