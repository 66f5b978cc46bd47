"""Prompts with images and sounds, whatever happens: the tokens that each request has when it is alone."""

import asyncio
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_image_models
import tiny_sound_model
from engines import until
from scheduler_in_process import scheduler
from sounds import file_of
from worker_in_process import worker_in_process

from pagewire_client import Client, Image, SamplingParams, Sound
from pagewire_client.llm import collect
from pagewire_client.prompts import Part
from scheduler_service.core import PreemptionMode

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"n": 3, "temperature": 1.5, "seed": 4},
    {"beam_width": 2},
    {"temperature": 0, "regex": "[a-z]{6}", "ignore_eos": False},
    {"temperature": 0.9, "seed": 5, "logprobs": 1, "repetition_penalty": 1.2},
]
FIRST = ord("!")
"""The character of word 0."""
Outputs = list[list[int]]


def prompts(family: str) -> list[Sequence[Part]]:
    """One item, two, the first again behind other tokens, and none."""
    first: Part
    second: Part
    if family == "qwen2_audio":
        first, second = (Sound(file_of(tiny_sound_model.tone(seconds))) for seconds in (0.5, 0.9))
    else:
        first, second = (Image(tiny_image_models.picture(*size).data) for size in ((40, 16), (12, 60)))
    return [[[5, 6], first, [7, 8, 9]], [first, [10], second, [11]], [[12, 13, 14, 15], first, [16]], [[17] * 30]]


async def outputs(client: Client, prompt: Sequence[Part], kind: dict[str, Any]) -> Outputs:
    sampling = SamplingParams(**{"max_tokens": 16, "ignore_eos": True} | kind)
    return [output.token_ids for output in (await collect(client, prompt, sampling)).outputs]


async def num_cached(client: Client, prompt: Sequence[Part]) -> int:
    return (await collect(client, prompt, SamplingParams(max_tokens=1, temperature=0))).cached_tokens


def make_model(family: str, path: Path) -> Path:
    """Its tokens have bytes, for forms: each word is a letter or another character."""
    if family == "qwen2_audio":
        tiny_sound_model.make_model(path)
    else:
        tiny_image_models.make_model(path, family)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = {chr(FIRST + number) if number < 94 else f"t{number}": number for number in range(tiny_image_models.WORDS)}
    tokenizer["model"] |= {"vocab": words, "unk_token": "!"}
    tokenizer["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


async def alone(model: Path, family: str, **settings: Any) -> list[Outputs]:
    """The answers to one request after the other, with nothing kept between them."""
    async with (
        worker_in_process(model, **{"forms": True} | settings) as worker,
        scheduler(worker.address, model=str(model), prefix_caching=False) as one,
        Client(one.target) as client,
    ):
        await one.engine.model()
        found = [await outputs(client, prompt, kind) for prompt, kind in product(prompts(family), KINDS)]
    formed = found[3 :: len(KINDS)]
    letters = range(ord("a") - FIRST, ord("z") + 1 - FIRST)
    assert all(len(answer[0]) >= 6 and set(answer[0][:6]) <= set(letters) for answer in formed)
    assert all(answer != other for answer, other in zip(formed, found[:: len(KINDS)], strict=True))
    return found


async def together(client: Client, family: str) -> list[Outputs]:
    return await asyncio.gather(*(outputs(client, prompt, kind) for prompt, kind in product(prompts(family), KINDS)))


@pytest.mark.usefixtures("all_verified")
@pytest.mark.parametrize(("family", "mode", "settings"), [
    ("gemma3", "swap", {"kv_cache_dtype": "int8"}),
    ("qwen3_vl", "recompute", {}),
    ("qwen2_audio", "swap", {"quantization": "w8a8", "dtype": "bfloat16"}),
])  # fmt: skip
async def test_requests_that_preempt_each_other_say_what_they_say_alone(
    family: str, mode: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """From the prefix cache and without, in small chunks, and with drafts."""
    model = make_model(family, tmp_path / "model")
    expected = await alone(model, family, **settings)
    small = {"num_gpu_blocks_override": 36, "swap_space": 0.01, "max_num_batched_tokens": 48, "max_num_seqs": 16}
    small |= {"speculative_config": {"method": "ngram"}}
    async with (
        worker_in_process(model, **{"forms": True} | settings | small) as worker,
        scheduler(worker.address, model=str(model), preemption_mode=mode, check_invariants=True) as one,
        Client(one.target) as client,
    ):
        await one.engine.model()
        assert await together(client, family) == expected
        assert await together(client, family) == expected
        (served,) = one.engine.workers.all
        assert served.scheduler is not None
        assert served.scheduler.num_preemptions[PreemptionMode(mode)]
        assert served.drafts.verified.num_tokens
        prompt = prompts(family)[1]
        assert [await num_cached(client, prompt) > 0 for _ in range(2)][1]


@pytest.mark.parametrize("family", ["gemma3", "qwen2_audio"])
async def test_requests_that_lose_their_worker_say_what_they_say_alone(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    expected = await alone(model, family)
    async with (
        worker_in_process(model, forms=True) as first,
        worker_in_process(model, forms=True) as second,
        scheduler(first.address, second.address, model=str(model)) as one,
        Client(one.target) as client,
    ):
        await one.engine.model()
        await until(lambda: len(one.engine.workers.serving) == 2)
        lost = one.engine.workers.all[0]
        answers = asyncio.create_task(together(client, family))
        await until(lambda: lost.num_steps > 8)
        await first.server.server.stop(None)
        assert await answers == expected
        assert lost.num_losses == 1
