"""The field `model` of an HTTP request may name an adapter, on every route, and an answer names it too."""

from pathlib import Path
from typing import Any

import openai
import pytest
from http_edge import http_edge
from http_requests import WORDS
from lora_helpers import serving

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect

CHAT: list[Any] = [{"role": "user", "content": "abcabc"}]
GO_ON = {"ignore_eos": True}


async def test_a_model_may_be_an_adapter_and_tokens_may_be_biased(tiny_model_directory: Path, adapters: Path) -> None:
    model = tiny_model_directory.name
    async with (
        serving(tiny_model_directory, adapters) as (one, _),
        http_edge(one.link) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        Client(one.target) as ours,
    ):
        said = {}
        for name in (model, "one", "two"):
            for bias in ({}, {77: 6.0, 78: 5.5}):
                params = SamplingParams(**WORDS, **GO_ON, logit_bias=bias)
                lora_name = "" if name == model else name
                texts = [(await collect(ours, p, params, lora_name=lora_name)).outputs[0].text for p in (CHAT, "abc")]
                asked = {"model": name, "extra_body": GO_ON, "logit_bias": {str(key): bias[key] for key in bias}}
                whole = await client.chat.completions.create(messages=CHAT, **WORDS, **asked)
                stream = await client.chat.completions.create(messages=CHAT, stream=True, **WORDS, **asked)
                pieces = [chunk async for chunk in stream]
                plain = await client.completions.create(prompt="abc", **WORDS, **asked)
                assert whole.choices[0].message.content == texts[0]
                assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == texts[0]
                assert plain.choices[0].text == texts[1]
                assert {answer.model for answer in (whole, *pieces, plain)} == {name}
                said[name, bool(bias)] = texts
        assert len(set(map(tuple, said.values()))) == 6
        listed = [shown async for shown in client.models.list()]
        assert [shown.id for shown in listed] == [model, "one", "three", "two"]
        assert [shown.parent for shown in listed] == [None, model, model, model]
        assert await client.models.retrieve("two") == listed[-1]
        words = "there is no model 'four'; this server has tiny-llama, one, three, two"
        with pytest.raises(openai.NotFoundError, match=words):
            await client.models.retrieve("four")
        with pytest.raises(openai.NotFoundError, match=words):
            await client.chat.completions.create(model="four", messages=CHAT)
        with pytest.raises(openai.BadRequestError, match=r"logit_bias\[77\] is 101") as error:
            await client.chat.completions.create(model=model, messages=CHAT, logit_bias={"77": 101})
        assert error.value.param == "logit_bias"
        found = await client.embeddings.create(model="one", input="abc")
        (expected,) = await ours.embed(["abc"], lora_name="one")
        assert found.data[0].embedding == list(expected.vector)
