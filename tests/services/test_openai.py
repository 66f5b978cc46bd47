"""OpenAI's own client against OpenAI's HTTP API, through the real gateway."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from cluster import cluster_state, until_idle
from ports import free_address
from test_processes import WORKER_SIZES, Start
from test_processes import start as start
from tiny_model import SPECIAL_TOKENS

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.http.gateway import Gateway, is_ready
from pagewire_client.llm import collect
from pagewire_client.local import ServerError

MODEL = "tiny-llama"
CHAT: list[Any] = [{"role": "user", "content": "hello"}]
GO_ON = {"ignore_eos": True}
WORDS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 20}

PARAMETERS: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_k": 3},
    {"min_p": 0.3},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 2.0},
    {"ignore_eos": True},
    {"min_tokens": 20},
    {"stop_token_ids": list(range(60, 120))},
    {"regex": "[a-z]{5,9}!"},
]


@pytest.fixture(scope="module")
def gateway(tiny_server: LocalServer) -> Iterator[Gateway]:
    with Gateway(tiny_server.target, free_address()) as gateway:
        gateway.wait_until_ready(60)
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def assert_nothing_is_held(target: str) -> None:
    (worker,) = (await until_idle(target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks


async def test_a_chat_has_the_text_of_our_own_protocol_whole_and_streamed(
    client: openai.AsyncOpenAI, tiny_server: LocalServer
) -> None:
    async with Client(tiny_server.target) as ours:
        expected = (await collect(ours, CHAT, SamplingParams(**WORDS))).outputs[0]
    whole = await client.chat.completions.create(model=MODEL, messages=CHAT, **WORDS)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}, **WORDS
        )
    ]
    assert whole.choices[0].message.content == expected.text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert whole.choices[0].finish_reason == "length"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens == 20
    assert (await client.models.list()).data[0].id == MODEL


async def test_completions_of_n_of_a_seed_and_up_to_a_stop(client: openai.AsyncOpenAI) -> None:
    several = await client.completions.create(model=MODEL, prompt="hello", n=3, **WORDS)
    again = await client.completions.create(model=MODEL, prompt="hello", n=3, **WORDS)
    texts = [choice.text for choice in several.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    stop = texts[0][8:10]
    stopped = await client.completions.create(model=MODEL, prompt="hello", stop=[stop], **WORDS)
    assert stopped.choices[0].text == texts[0][: texts[0].index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_parameters_have_the_effect_that_they_have_in_our_own_protocol(
    client: openai.AsyncOpenAI, tiny_server: LocalServer, endpoint: str
) -> None:
    own = ("presence_penalty", "frequency_penalty", "top_p")  # of OpenAI's API, the others are vLLM's
    for given in PARAMETERS:
        sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 24} | given
        async with Client(tiny_server.target) as ours:
            prompt: Any = "hello" if endpoint == "completions" else CHAT
            expected = (await collect(ours, prompt, SamplingParams(**sampling))).outputs[0].text
        more = {name: value for name, value in given.items() if name not in own}
        plain = {name: value for name, value in sampling.items() if name not in more}
        if endpoint == "completions":
            completion = await client.completions.create(model=MODEL, prompt="hello", extra_body=more, **plain)
            text: str | None = completion.choices[0].text
        else:
            answer = await client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=more, **plain)
            text = answer.choices[0].message.content
        assert text == expected, given


async def test_log_probabilities_of_a_chat_are_our_own_but_of_special_tokens(
    client: openai.AsyncOpenAI, tiny_server: LocalServer
) -> None:
    async with Client(tiny_server.target) as ours:
        sampling = SamplingParams(max_tokens=20, temperature=0, logprobs=3, ignore_eos=True)
        expected = (await collect(ours, CHAT, sampling)).outputs[0].logprobs
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=20, temperature=0, logprobs=True, top_logprobs=3, extra_body=GO_ON
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    found = [one.logprob for entry in logprobs.content for one in (entry, *entry.top_logprobs)]
    visible = [entry for entry in expected if entry.chosen.token_id >= len(SPECIAL_TOKENS)]
    assert found == pytest.approx([one.logprob for entry in visible for one in (entry.chosen, *entry.top)])


async def test_bad_input_is_400_and_an_unknown_model_404(client: openai.AsyncOpenAI) -> None:
    create = client.completions.create
    with pytest.raises(openai.BadRequestError, match="the prompt needs at least one token"):
        await create(model=MODEL, prompt="")
    with pytest.raises(openai.BadRequestError):
        await create(model=MODEL, prompt="x" * 600)
    with pytest.raises(openai.NotFoundError):
        await create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="cannot be empty"):
        await client.embeddings.create(model=MODEL, input="")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="another", input="x")


async def test_what_the_gateway_does_not_pass_on(client: openai.AsyncOpenAI, tiny_server: LocalServer) -> None:
    """docs/openai.md lists these limits: a test that fails here tells that one is gone."""
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=MODEL, prompt=[72, 73])
    completion = await client.completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=2)
    assert completion.choices[0].logprobs is None
    forced = {"max_tokens": 4, "temperature": 0, "logit_bias": {"80": 100}}
    text = (await client.completions.create(model=MODEL, prompt="x", **forced)).choices[0].text
    chat = (await client.chat.completions.create(model=MODEL, messages=CHAT, **forced)).choices[0].message.content
    assert text != chat
    spelled: list[Any] = [{"role": "user", "content": SPECIAL_TOKENS[1]}]
    usage = (await client.chat.completions.create(model=MODEL, messages=spelled, max_tokens=1)).usage
    async with Client(tiny_server.target) as ours:
        as_data = len(await ours.tokenize(spelled))
        (joined,) = await ours.embed(["one two"])
    many = await client.embeddings.create(model=MODEL, input=["one", "two"], dimensions=8)
    assert [one.embedding for one in many.data] == [pytest.approx(list(joined.vector), abs=1e-6)]
    assert usage is not None
    assert usage.prompt_tokens == as_data - len(SPECIAL_TOKENS[1]) + 1


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_frees_its_blocks(
    client: openai.AsyncOpenAI, tiny_server: LocalServer, stream: bool
) -> None:
    endless: dict[str, Any] = {"max_tokens": 450, "extra_body": GO_ON}
    call = asyncio.create_task(client.completions.create(model=MODEL, prompt="x", stream=stream, **endless))
    before = (await cluster_state(tiny_server.admin_target)).num_output_tokens
    while (await cluster_state(tiny_server.admin_target)).num_output_tokens < before + 5:
        pass
    if stream:
        await (await call).close()
    else:
        call.cancel()
        await asyncio.wait([call])
    await assert_nothing_is_held(tiny_server.admin_target)
    assert (await cluster_state(tiny_server.admin_target)).num_output_tokens < before + 450


def test_nothing_without_a_key_changes_the_gateways_backends(gateway: Gateway) -> None:
    body = json.dumps({"url": "grpc://127.0.0.1:1"}).encode()
    request = urllib.request.Request(f"{gateway.url}/workers", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as error, urllib.request.urlopen(request, timeout=30):
        pass
    with error.value:
        assert error.value.code == 401


def test_an_address_that_cannot_be_had_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"cannot listen on {listen}"):
            Gateway("127.0.0.1:1", listen)
    with pytest.raises(ServerError, match="'8000' is no HOST:PORT"):
        Gateway("127.0.0.1:1", "8000")


def test_a_gateway_may_be_started_before_its_scheduler(start: Start, tiny_model_directory: Path) -> None:
    """As Compose does."""
    (listen, target), model = (free_address(), free_address()), str(tiny_model_directory)
    command = [sys.executable, "-m", "pagewire_client", "serve", "--target", target, "--listen", listen]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, worker = start("worker_service", "--model", model, *WORKER_SIZES)
        assert process.poll() is None
        start("scheduler_service", "--model", model, "--workers", worker, listen=target)
        assert process.stderr is not None
        with process.stderr as words:
            assert any(f"http://{listen}/v1" in line for line in words)
        assert is_ready(f"http://{listen}")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_serve_starts_everything_and_says_what_to_try(tiny_model_directory: Path) -> None:
    listen = free_address()
    command = [sys.executable, "-m", "pagewire_client", "serve", "--model", str(tiny_model_directory)]
    process = subprocess.Popen([*command, "--listen", listen], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        with process.stderr as words:
            assert any(line.startswith(f"curl http://{listen}/v1/chat/completions") for line in words)
            body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 3}).encode()
            url = f"http://{listen}/v1/chat/completions"
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert not is_ready(f"http://{listen}")


async def test_an_answer_has_the_schema_that_was_asked_for(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}, "warm": {"type": "boolean"}},
        "required": ["unit", "warm"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": schema}}
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, response_format=asked, max_tokens=200, temperature=1.0, seed=3
    )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert found.keys() == {"unit", "warm"}
    assert found["unit"] in ("c", "f")
    whole = await client.chat.completions.create(
        model=MODEL, messages=CHAT, response_format={"type": "json_object"}, max_tokens=200, seed=3
    )
    content = whole.choices[0].message.content or ""
    assert content.lstrip().startswith("{")  # whether it ends in time is the model's affair
    if whole.choices[0].finish_reason == "stop":
        json.loads(content)


async def test_a_tool_that_is_required_is_called_with_its_arguments(client: openai.AsyncOpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=200,
        seed=3,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in ("c", "f")
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")


def test_it_listens_on_addresses_of_ipv6_too_and_ends_with_the_command_that_is_killed(
    tiny_server: LocalServer,
) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listen = f"[::1]:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "pagewire_client", "serve", "--target", tiny_server.target, "--listen", listen]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        with process.stderr as words:
            assert any(f"http://{listen}/v1" in line for line in words)
        assert is_ready(f"http://{listen}")
        gateways = psutil.Process(process.pid).children(recursive=True)
        assert gateways
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(gateways, 30)
    assert not alive
    assert not is_ready(f"http://{listen}")


async def test_embeddings_are_the_vectors_of_our_own_protocol(
    client: openai.AsyncOpenAI, tiny_server: LocalServer
) -> None:
    texts = ["hello", "one two three"]
    async with Client(tiny_server.target) as ours:
        expected = await ours.embed(texts)
    for text, vector in zip(texts, expected, strict=True):
        found = await client.embeddings.create(model=MODEL, input=text)
        assert found.data[0].embedding == pytest.approx(list(vector.vector), abs=1e-6)
        assert found.usage.prompt_tokens == len(text)
