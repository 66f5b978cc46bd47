"""prompt_embeds of /v1/completions: vLLM's field, as safetensors in base64."""

import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
from embeds_helpers import embeddings_of, serving_embeds
from http_edge import http_edge

from pagewire_client import PromptEmbeds
from scheduler_service.frontend.http.body import check_simple
from scheduler_service.frontend.http.errors import HttpError

IDS = [*range(70, 90)]
JSON = {"content-type": "application/json"}
FIELDS: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
async def url(tiny_model_directory: Path) -> AsyncIterator[str]:
    async with serving_embeds(tiny_model_directory) as (one, _), http_edge(one.link) as url:
        yield url


@pytest.fixture
def encoded(tiny_model_directory: Path) -> str:
    return base64.b64encode(PromptEmbeds.of(embeddings_of(tiny_model_directory)[IDS]).data).decode()


async def test_embeddings_of_tokens_give_the_text_of_the_tokens(url: str, encoded: str) -> None:
    """Also through OpenAI's library, which wants a prompt; several are choices, before those of other prompts."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def texts(prompt: Any, **given: Any) -> list[str]:
            answer = await client.completions.create(model="tiny-llama", prompt=prompt, **FIELDS, extra_body=given)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 20 * len(answer.choices)
            return [choice.text for choice in answer.choices]

        (text,) = await texts(IDS)
        assert await texts("", prompt_embeds=encoded) == [text]
        assert await texts([IDS], prompt_embeds=[encoded, encoded]) == [text] * 3
        more = {"prompt_embeds": encoded, "stream_options": {"continuous_usage_stats": True}}
        streamed = await client.completions.create(
            model="tiny-llama", prompt="", stream=True, **FIELDS, extra_body=more
        )
        chunks = [chunk async for chunk in streamed]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
        assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {20}
    async with aiohttp.ClientSession() as session:
        body = FIELDS | {"prompt_embeds": encoded, "return_token_ids": True}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            (choice,) = (await answer.json())["choices"]
    assert (choice["text"], choice["prompt_token_ids"], len(choice["token_ids"])) == (text, None, 8)


async def refusal(url: str, route: str = "completions", **body: Any) -> tuple[int, str]:
    data = io.BytesIO(json.dumps(body).encode())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/{route}", data=data, headers=JSON) as answer,
    ):
        return answer.status, (await answer.json())["error"]["message"]


async def test_what_cannot_be_is_refused(url: str, encoded: str) -> None:
    saved = io.BytesIO()
    torch.save(torch.zeros(2, 64), saved)
    for body, reason in (
        ({"prompt_embeds": base64.b64encode(saved.getvalue()).decode()}, "is a pickle, as torch.save writes"),
        ({"prompt_embeds": "x*"}, "prompt_embeds is not base64"),
        ({"prompt_embeds": encoded + "AAAA"}, "prompt_embeds is not base64"),
        ({"prompt_embeds": ["", encoded]}, "has 0 bytes and is no safetensors file"),
        ({"prompt_embeds": []}, "it must have 1 to 256"),
        ({"prompt_embeds": ""}, "prompt_embeds"),
        ({"prompt_embeds": encoded, "echo": True}, "echo is not possible with prompt_embeds"),
        ({"prompt_embeds": encoded, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens is not possible"),
        ({"prompt_embeds": encoded, "prompt_logprobs": 1}, "prompt_logprobs is not possible"),
        ({}, "prompt: Field required"),
    ):
        status, message = await refusal(url, **body)
        assert status == 400
        assert reason in message


async def test_other_routes_have_no_such_field(url: str, encoded: str) -> None:
    chat, text = {"messages": [{"role": "user", "content": "a"}]}, {"input": "a"}
    for route, body in (("chat/completions", chat), ("responses", text), ("embeddings", text)):
        assert await refusal(url, route, **body, prompt_embeds=encoded) == (400, "prompt_embeds is not supported here")


async def test_a_body_may_be_large_with_embeddings_alone(url: str) -> None:
    """A text of the same size is refused, and so is much that takes long to parse."""
    large = base64.b64encode(PromptEmbeds.of(torch.zeros(30_000, 64)).data).decode()
    assert "parts has 30000 tokens; the context has 512" in (await refusal(url, prompt_embeds=large))[1]
    assert (await refusal(url, prompt=[0] * 5_000_000))[0] == 413
    for costly in (b"[" * 2_000_000, b"\\u0041" * 200_000):
        with pytest.raises(HttpError):
            await check_simple(costly, 1 << 20)
