"""What goes around the gateway: adapters, which `model` names, and biases of tokens."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from http_edge import http_edge
from tiny_adapters import write_three

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.http.errors import HttpError
from pagewire_client.http.unread import Unread, read_object, take_out, write_object
from pagewire_client.llm import collect

CHAT: list[Any] = [{"role": "user", "content": "abcabc"}]
WORDS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 20}
GO_ON = {"ignore_eos": True}


async def test_a_model_may_be_an_adapter_and_tokens_may_be_biased(tiny_model_directory: Path, tmp_path: Path) -> None:
    model = tiny_model_directory.name
    adapters = write_three(tmp_path / "adapters")
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            "--num-gpu-blocks-override",
            "64",
            "--block-size",
            "8",
            "--max-loras",
            "4",
            "--swap-space",
            "0",
        ],
        scheduler_arguments=["--lora-dir", str(adapters), "--check-invariants"],
    ) as server:
        await ask_through_the_gateway(server.target, model)


async def ask_through_the_gateway(target: str, model: str) -> None:
    async with (
        http_edge(target, model, has_gateway=True) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        Client(target) as ours,
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
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("four")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="four", messages=CHAT)
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await client.chat.completions.create(model=model, messages=CHAT, logit_bias={"77": 101})
        found = await client.embeddings.create(model="one", input="abc")
        (expected,) = await ours.embed(["abc"], lora_name="one")
        assert found.data[0].embedding == list(expected.vector)


def test_only_what_the_gateway_does_not_read_is_taken_out() -> None:
    for plain in ({"model": "base", "messages": [], "logit_bias": None}, {"model": 3}, {"model": ""}):
        fields: dict[str, Any] = dict(plain)
        assert (take_out(fields, "base"), fields) == (Unread(), plain)
    fields = {"model": "d\u00e9", "top_k": 3, "logit_bias": {"7": 1, "9": -0.5}}
    unread = take_out(fields, "base")
    assert (fields["model"], fields["top_k"]) == ("base", 3)
    assert unread == Unread("d\u00e9", {7: 1.0, 9: -0.5})


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_an_answer_names_the_adapter_however_it_is_cut(size: int) -> None:
    """What text says stays, and no event waits for the next one."""
    event = r'{"model":"base","text":"\"model\":\"base\"","x":"mode"}' + "\n\n"
    unread, said, rest = Unread("d\u00e9"), b"", b""
    for number in range(1, 4):
        data = event.encode()
        for start in range(0, len(data), size):
            piece, rest = unread.named_in(rest + data[start : start + size], "base")
            said += piece
        assert (said.count(b"\n\n"), rest) == (number, b"")
    for line in said.decode().split("\n\n")[:-1]:
        assert json.loads(line) == {"model": "d\u00e9", "text": '"model":"base"', "x": "mode"}
    assert Unread().named_in(b'{"model":"base', "base") == (b'{"model":"base', b"")


@pytest.mark.parametrize(
    "given", ["[7]", '"7"', '{"a": 1}', '{"-1": 1}', '{"7": true}', '{"7": "1"}', '{"7": null}', '{"1234567890": 1}']
)
def test_biases_are_numbers_of_tokens(given: str) -> None:
    with pytest.raises(HttpError, match="logit_bias"):
        take_out(json.loads(f'{{"logit_bias": {given}}}'), "base")


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"x": ' + b"9" * 5000 + b"}", b'{"x": NaN}'])
def test_the_gateway_is_given_nothing_that_was_not_understood_before(body: bytes) -> None:
    with pytest.raises(HttpError):
        write_object(read_object(body))
