"""Ollama's own client against /api. The client refuses every answer that is not of its types."""

import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from pagewire_client import LocalServer
from scheduler_service.frontend.http.ollama.fields import _NEUTRAL, _RENAMED, _RUNTIME, _SAME

MODEL = "tiny-agent"
USER: dict[str, Any] = {"role": "user", "content": "hello"}
UNIT = {"type": "object", "properties": {"unit": {"type": "string", "enum": ["c", "f"]}}, "required": ["unit"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": UNIT}}
GREEDY = {"temperature": 0, "num_predict": 24, "num_ctx": 4096}


@pytest.fixture
async def client(agent_server: LocalServer) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=agent_server.http_url) as client:
        yield client


async def said(client: ollama.AsyncClient, **asked: Any) -> ollama.ChatResponse:
    """The answer, which is the same whole and streamed."""
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "options": GREEDY} | asked
    whole = await client.chat(**fields)
    content, thinking, calls = "", "", list[Any]()
    async for part in await client.chat(stream=True, **fields):
        content += part.message.content or ""
        thinking += part.message.thinking or ""
        calls += part.message.tool_calls or []
    message = whole.message
    assert (content, thinking, calls) == (message.content, message.thinking or "", message.tool_calls or [])
    for name in ("done", "done_reason", "eval_count", "prompt_eval_count"):
        assert whole[name] == part[name]
    assert part.done
    assert min(part[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration")) > 0
    return whole


async def test_thinking_and_the_answer(client: ollama.AsyncClient) -> None:
    free = await said(client, model=f"{MODEL}:latest", keep_alive="5m")
    assert free.message.thinking
    assert not free.message.content
    assert (free.done_reason, free.eval_count) == ("length", 24)
    off = await said(client, think=False)
    assert off.message.content
    assert not off.message.thinking
    stop = off.message.content[5:7]
    stopped = await said(client, think=False, options=GREEDY | {"stop": [stop]})
    assert stopped.done_reason == "stop"
    assert stopped.message.content == off.message.content[: off.message.content.index(stop)]
    texts = []
    for raw in (False, True):
        answer = await client.generate(MODEL, "hello", think=False, raw=raw, options=GREEDY)
        parts = [
            one
            async for one in await client.generate(MODEL, "hello", think=False, raw=raw, options=GREEDY, stream=True)
        ]
        assert "".join(part.response or "" for part in parts) == answer.response
        texts.append(answer.response)
    assert texts[0] == off.message.content != texts[1]
    assert (await client.generate(MODEL)).done_reason == "load"


async def test_calls_of_tools_and_their_results(client: ollama.AsyncClient) -> None:
    call = {"function": {"name": "weather", "arguments": {"unit": "c"}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "thinking": "So.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    before, after = [await said(client, messages=one, tools=[TOOL]) for one in (messages[:1], messages)]
    assert after.prompt_eval_count - before.prompt_eval_count > len("So.sunny")
    form = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    answer = await client.chat(MODEL, [USER], format=form, think=False, options=GREEDY)
    assert json.loads(answer.message.content or "") == {"a": 1}


async def test_models_and_vectors(client: ollama.AsyncClient) -> None:
    assert [one.model for one in (await client.list()).models] == [MODEL]
    shown = await client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking", "embedding"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["hermes.context_length"] == 2048
    found = await client.embed(MODEL, ["a", "b"], dimensions=8)
    assert [len(vector) for vector in found.embeddings] == [8, 8]
    assert [sum(x * x for x in vector) for vector in found.embeddings] == pytest.approx([1, 1], abs=1e-5)
    assert found.prompt_eval_count


@pytest.mark.parametrize(
    ("asked", "words", "status"),
    [
        ({"model": "x"}, "there is no model 'x'; this server has tiny-agent", 404),
        ({"options": {"mirostat": 1}}, r"options.mirostat is 1; it may only be 0", 400),
        ({"options": {"temperatur": 1}}, "options.temperatur is 1; this server does not know it", 400),
        ({"options": {"temperature": -1}}, "temperature is -1", 400),
        ({"messages": [USER | {"images": ["aGk="]}]}, "images is set, and this model reads text alone", 400),
        ({"logprobs": True}, "logprobs is not supported here", 400),
        ({"think": "high"}, "think is 'high'; the model's chat template has no levels", 400),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_by_its_name(
    client: ollama.AsyncClient, asked: dict[str, Any], words: str, status: int
) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match=words) as refused:
            await consumed(client, {"model": MODEL, "messages": [USER], "stream": stream} | asked)
        assert refused.value.status_code == status


async def consumed(client: ollama.AsyncClient, asked: dict[str, Any]) -> None:
    answer = await client.chat(**asked)
    if asked["stream"]:
        [_ async for _ in answer]


def test_every_option_of_the_client_is_known() -> None:
    """An option is obeyed, refused by a sentence that names its allowed value, or listed as one without effect."""
    for name in ollama.Options.model_fields:
        assert name in {*_SAME, *_RENAMED, *_RUNTIME, *_NEUTRAL}


async def test_a_raw_prompt_has_special_tokens_and_no_system_message(client: ollama.AsyncClient) -> None:
    sizes = [
        (await client.generate(MODEL, "<|im_start|>", raw=True, options=GREEDY | {"num_predict": 1})).prompt_eval_count,
        (await client.generate(MODEL, "x", raw=True, options=GREEDY | {"num_predict": 1})).prompt_eval_count,
    ]
    assert sizes[0] == sizes[1]
    with pytest.raises(ollama.ResponseError, match="system cannot be combined with raw"):
        await client.generate(MODEL, "x", system="y", raw=True, options=GREEDY)
