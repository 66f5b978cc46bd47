"""A model served in float32 against transformers' own generation, whatever the scheduler does to it.

The model is a tiny one of random weights: its output is another one after any other token of the prompt, which is not
so of the default model's (test_default_model.py).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from cluster import cluster_state, until_idle
from prompts import PROMPTS
from tiny_model import write_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_oracle import likeliest_tokens

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect

NUM_TOKENS = 32
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)

BEAM_PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "The three primary colours are",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a small house at the edge of the forest, and in it",
]

# Short prompts, for a long one takes longer to compute again than all of these. One takes up to 7 blocks with its
# output, and all grow to 95. How often a group is preempted depends on how the arrivals fall.
CROWD = PROMPTS[:20]
SMALL_POOL = 40


@pytest.fixture(scope="module")
def model_directory(byte_tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has room for the longest prompt's bytes. Beams come early to one of its end tokens; the other one is
    the tokenizer's."""
    directory = tmp_path_factory.mktemp("long") / "tiny-llama"
    write_tiny_llama(directory, byte_tokenizer_directory, max_position_embeddings=8192)
    config = directory / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 75}))
    return directory


@pytest.fixture(scope="module")
def server(model_directory: Path) -> Iterator[LocalServer]:
    with LocalServer(str(model_directory), worker_arguments=["--dtype", "float32"]) as server:
        yield server


@pytest.fixture(scope="module", params=["recompute", "swap"])
def small_server(request: pytest.FixtureRequest, model_directory: Path) -> Iterator[LocalServer]:
    with LocalServer(
        str(model_directory),
        worker_arguments=["--dtype", "float32", "--num-gpu-blocks-override", str(SMALL_POOL), "--swap-space", "0.005"],
        scheduler_arguments=["--preemption-mode", request.param, "--check-invariants"],
    ) as server:
        yield server


@pytest.fixture(scope="module")
def concurrent_tokens(server: LocalServer) -> list[list[int]]:
    """The server's outputs for all prompts, sent at once."""
    return asyncio.run(together(server.target, [GREEDY] * len(PROMPTS)))


@pytest.fixture(scope="module")
def greedy_tokens(model_directory: Path, concurrent_tokens: list[list[int]]) -> list[list[int]]:
    """Those of transformers, if they are the output itself."""
    return likeliest_tokens(model_directory, PROMPTS, concurrent_tokens)


SAMPLINGS = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seed=1000 + index, ignore_eos=True)
    for index in range(len(CROWD))
]


async def together(target: str, sampling: list[SamplingParams], prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """All of the prompts at once."""
    async with Client(target) as client:
        pairs = zip(prompts, sampling, strict=True)
        completions = await asyncio.gather(*(collect(client, prompt, params) for prompt, params in pairs))
    return [completion.outputs[0].token_ids for completion in completions]


async def preemptions(target: str) -> int:
    (worker,) = (await cluster_state(target)).workers
    return worker.num_preemptions


async def until_preemptions(server: LocalServer, number: int, check: Callable[[], Awaitable[None]]) -> None:
    """Checks of outputs that were computed together, until they have cost so many preemptions in all."""
    enough = await preemptions(server.admin_target) + number
    for _ in range(6):
        await check()
        if await preemptions(server.admin_target) >= enough:
            return
    pytest.fail(f"six rounds in a pool for a fraction of the prompts cost less than {number} preemptions")


async def until_ten_preemptions(server: LocalServer, sampling: list[SamplingParams], expected: list[list[int]]) -> None:
    async def check() -> None:
        assert await together(server.target, sampling, CROWD) == expected

    await until_preemptions(server, 10, check)


def test_there_are_32_prompts_and_they_differ() -> None:
    assert len(set(PROMPTS)) == 32


async def test_32_concurrent_greedy_outputs_equal_transformers(
    server: LocalServer, concurrent_tokens: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in concurrent_tokens)
    assert concurrent_tokens == greedy_tokens
    assert await preemptions(server.admin_target) == 0


async def test_greedy_outputs_equal_transformers_without_planning_ahead(
    model_directory: Path, greedy_tokens: list[list[int]]
) -> None:
    worker, scheduler = ["--dtype", "float32"], ["--max-in-flight-steps", "1"]
    with LocalServer(str(model_directory), worker_arguments=worker, scheduler_arguments=scheduler) as server:
        async with Client(server.target) as client:
            completions = await asyncio.gather(*(collect(client, prompt, GREEDY) for prompt in PROMPTS[:8]))
    assert [completion.outputs[0].token_ids for completion in completions] == greedy_tokens[:8]


async def test_outputs_from_cached_prefixes_equal_transformers(
    server: LocalServer, greedy_tokens: list[list[int]]
) -> None:
    async with Client(server.target) as client:
        await collect(client, PROMPTS[-1], GREEDY)
        completion = await collect(client, PROMPTS[-1], GREEDY)
    assert completion.prompt_tokens > 900
    assert completion.cached_tokens == (completion.prompt_tokens - 1) // 16 * 16
    assert completion.outputs[0].token_ids == greedy_tokens[-1]


async def test_outputs_that_share_a_prompt_by_copy_on_write_equal_transformers(
    server: LocalServer, greedy_tokens: list[list[int]]
) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, n=3)
    async with Client(server.target) as client:
        completions = await asyncio.gather(*(collect(client, prompt, sampling) for prompt in PROMPTS[:8]))
    for completion, expected in zip(completions, greedy_tokens, strict=False):
        assert [output.token_ids for output in completion.outputs] == [expected] * 3


async def test_greedy_outputs_equal_transformers_through_at_least_ten_preemptions(
    small_server: LocalServer, greedy_tokens: list[list[int]]
) -> None:
    await until_ten_preemptions(small_server, [GREEDY] * len(CROWD), greedy_tokens[: len(CROWD)])
    (worker,) = (await until_idle(small_server.admin_target)).workers
    assert worker.num_free_device_blocks == SMALL_POOL
    assert worker.num_free_host_blocks == worker.num_host_blocks


BEAMS = [
    {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 24},
    {"num_beams": 3, "num_return_sequences": 1, "max_new_tokens": 40, "length_penalty": 0.0},
    {"num_beams": 6, "num_return_sequences": 2, "max_new_tokens": 32, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 24, "min_new_tokens": 12, "length_penalty": -1.0},
]


@pytest.fixture(scope="module")
def beam_prompts(model_directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    return [tokenizer(prompt).input_ids for prompt in BEAM_PROMPTS]


@pytest.fixture(scope="module")
def beam_outputs(model_directory: Path, beam_prompts: list[list[int]]) -> list[list[list[int]]]:
    """What transformers' beam search finds for each prompt and way to search, best first, in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    found = []
    ends = [model.generation_config.eos_token_id, AutoTokenizer.from_pretrained(model_directory).eos_token_id]
    for prompt, options in zip(beam_prompts, BEAMS, strict=True):
        input_ids = torch.tensor([prompt])
        with torch.inference_mode():
            outputs = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                **options,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        texts = [output[len(prompt) :].tolist() for output in outputs]
        places = [next((place for place, token in enumerate(text, 1) if token in ends), None) for text in texts]
        found.append([text[:place] for text, place in zip(texts, places, strict=True)])
    assert {text[-1] for outputs in found for text in outputs} > {*ends}
    return found


async def search_together(target: str, prompts: list[list[int]]) -> list[list[list[int]]]:
    async with Client(target) as client:
        completions = await asyncio.gather(
            *(
                collect(
                    client,
                    prompt,
                    SamplingParams(
                        n=options["num_return_sequences"],
                        beam_width=options["num_beams"],
                        max_tokens=options["max_new_tokens"],
                        min_tokens=options.get("min_new_tokens"),
                        length_penalty=options.get("length_penalty"),
                        early_stopping=options.get("early_stopping"),
                    ),
                )
                for prompt, options in zip(prompts, BEAMS, strict=True)
            )
        )
    return [[output.token_ids for output in completion.outputs] for completion in completions]


async def test_beam_search_equals_transformers(
    server: LocalServer, beam_prompts: list[list[int]], beam_outputs: list[list[list[int]]]
) -> None:
    assert await search_together(server.target, beam_prompts) == beam_outputs


async def test_beam_search_equals_transformers_among_requests_that_preempt_each_other(
    small_server: LocalServer,
    greedy_tokens: list[list[int]],
    beam_prompts: list[list[int]],
    beam_outputs: list[list[list[int]]],
) -> None:
    async def check() -> None:
        greedy, beams = await asyncio.gather(
            together(small_server.target, [GREEDY] * 8, CROWD[:8]), search_together(small_server.target, beam_prompts)
        )
        assert greedy == greedy_tokens[:8]
        assert beams == beam_outputs

    await until_preemptions(small_server, 1, check)


@pytest.fixture(scope="module")
def sampled_tokens(server: LocalServer) -> list[list[int]]:
    """Every prompt of the crowd with a seed of its own, all at once in a pool that has room for them."""
    outputs = asyncio.run(together(server.target, SAMPLINGS, CROWD))
    assert len({tuple(tokens) for tokens in outputs}) == len(CROWD)
    return outputs


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(
    server: LocalServer, sampled_tokens: list[list[int]]
) -> None:
    async with Client(server.target) as client:
        for index in range(0, len(CROWD), 5):
            alone = await collect(client, CROWD[index], SAMPLINGS[index])
            assert alone.outputs[0].token_ids == sampled_tokens[index]


async def test_a_seed_gives_the_same_tokens_through_at_least_ten_preemptions(
    small_server: LocalServer, sampled_tokens: list[list[int]]
) -> None:
    await until_ten_preemptions(small_server, SAMPLINGS, sampled_tokens)
