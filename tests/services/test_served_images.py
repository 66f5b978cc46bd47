"""Answers about images by tiny models of random weights, over HTTP and gRPC, equal those of transformers."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from http_edge import http_edge
from scheduler_in_process import scheduler
from tiny_image_models import (
    FAMILIES,
    SPECIAL,
    VOCABULARY,
    WORDS,
    ImageOracle,
    Picture,
    Prompt,
    expand,
    make_model,
    picture,
)
from worker_in_process import worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, Image, SamplingParams

NUM_TOKENS = 6
AROUND = {"qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>")}
"""Special tokens that a family's chat template writes around an image."""
WIDE, TALL = picture(40, 16), picture(12, 60, seed=1)
CHATS: list[list[int | Picture]] = [[5, WIDE, 7], [TALL, 9], [WIDE, TALL, WIDE, 11], [13]]
"""Words by their numbers, and images. A word is a text of its own."""


def template(family: str) -> str:
    begin, end = AROUND.get(family, ("", ""))
    mark = "<start_of_image>" if family == "gemma3" else FAMILIES[family].image_token
    image = f"{begin}{mark}{end}"
    return (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '"
        + image
        + "' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )


def prompt_of(family: str, chat: list[int | Picture]) -> Prompt:
    """The prompt that the chat template writes."""
    begin, end = ([WORDS + SPECIAL.index(token) for token in (mark,) if token] for mark in AROUND.get(family, ("", "")))
    prompt: list[int | Picture] = []
    for part in chat:
        prompt += [part] if isinstance(part, int) else [*begin, part, *end]
    return prompt


def continuation(oracle: ImageOracle, prompt: Prompt) -> tuple[list[int], int]:
    """The likeliest words, and the number of prompt tokens. transformers would read a token of images as an image."""
    token_ids, pictures = expand(prompt, oracle.layouts)
    known = list(token_ids)
    for _ in range(NUM_TOKENS):
        row = oracle.logprobs(known, [one for _, one in pictures])[-1].clone()
        row[WORDS:] = -torch.inf
        known.append(int(row.argmax()))
    return known[len(token_ids) :], len(token_ids)


@pytest.fixture(scope="module", params=["gemma3", "llava_onevision", "qwen2_5_vl", "smolvlm"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("images") / request.param, request.param)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template(request.param)}))
    return path


@pytest.fixture
async def served(model: Path) -> AsyncIterator[tuple[str, Client]]:
    """Steps of 16 tokens, so that prompts are computed in chunks; and of more if they compute an image whole."""
    num_tokens = 20 if model.name == "gemma3" else 16
    async with (
        worker_in_process(model, max_num_batched_tokens=num_tokens, max_num_seqs=4) as worker,
        scheduler(worker.address, model=str(model)) as one,
        Client(one.target) as client,
    ):
        await one.engine.model()
        async with http_edge(one.link) as url:
            yield url, client


async def test_answers_equal_those_of_transformers(served: tuple[str, Client], model: Path) -> None:
    (url, client), oracle, family = served, ImageOracle(model), model.name
    bias = dict.fromkeys(range(WORDS, VOCABULARY), -100.0)
    for chat in CHATS:
        prompt = prompt_of(family, chat)
        expected, num_prompt_tokens = continuation(oracle, prompt)
        content: list[dict[str, Any]] = []
        for part in chat:
            if isinstance(part, int):
                content.append({"type": "text", "text": f"t{part}"})
            else:
                data = base64.b64encode(part.data).decode()
                content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "ignore_eos": True}
        body |= {"max_tokens": NUM_TOKENS, "return_token_ids": True, "logit_bias": bias}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()
        assert found["choices"][0]["token_ids"] == expected
        assert found["usage"]["prompt_tokens"] == num_prompt_tokens
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logit_bias=bias)
        said = {"role": "user", "content": [f"t{part}" if isinstance(part, int) else Image(part.data) for part in chat]}
        parts = [[part] if isinstance(part, int) else Image(part.data) for part in prompt]
        for asked in ([said], parts):
            responses: list[pb.GenerateResponse] = [one async for one in client.generate(asked, sampling)]
            assert [token_id for one in responses for token_id in one.token_ids] == expected
            assert responses[-1].usage.prompt_tokens == num_prompt_tokens
