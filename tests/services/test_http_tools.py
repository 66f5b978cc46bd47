"""Chats with tools over HTTP: calls obey their tools' schemas, whole and streamed, however they end."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_requests import CHAT, MODEL
from openai.types.chat import ChatCompletionMessage

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import LocalServer
from scheduler_service.frontend.chat.plain_tools import write_out_tools

TEMPLATE = """\
{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role }}:{{ message.content }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "<|im_end|>", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 120}


@pytest.fixture(scope="module")
def server(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A model whose chat template has tools, in Hermes' form."""
    folder = tmp_path_factory.mktemp("tools") / MODEL
    shutil.copytree(tiny_model_directory, folder)
    for name, fields in (
        ("tokenizer_config", {"chat_template": TEMPLATE}),
        ("config", {"max_position_embeddings": 2048}),
    ):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    sizes = ("--num-gpu-blocks-override", "256", "--block-size", "8", "--threads", "1", "--swap-space", "0", "--forms")
    with LocalServer(str(folder), worker_arguments=sizes) as server:
        yield server


@pytest.fixture
async def client(server: LocalServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **asked: Any) -> tuple[ChatCompletionMessage, str]:
    """The message and the reason of its end, which are the same whole and streamed."""
    fields: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS} | SAMPLED | asked
    whole = (await client.chat.completions.create(**fields)).choices[0]
    content, calls, reasons = "", list[tuple[str, str]](), []
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for part in choice.delta.tool_calls or ():
            if part.function.name:
                assert part.index == len(calls)
                calls.append((part.function.name, ""))
            calls[-1] = calls[-1][0], calls[-1][1] + (part.function.arguments or "")
    assert reasons == [whole.finish_reason]
    assert content == (whole.message.content or "")
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    return whole.message, whole.finish_reason


def arguments_of(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def test_a_call_that_is_required_is_of_a_given_tool_with_arguments_of_its_schema(
    client: openai.AsyncOpenAI,
) -> None:
    message, reason = await ask(client, tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = arguments_of(message)
    assert reason == "tool_calls"
    assert message.content is None
    assert arguments == {} if name == "now" else arguments.keys() == {"unit", "days"}


async def test_a_named_tool_is_called_and_no_other(client: openai.AsyncOpenAI) -> None:
    for name in ("weather", "now"):
        named = {"type": "function", "function": {"name": name}}
        message, _ = await ask(client, tool_choice=named)
        assert [found for found, _ in arguments_of(message)] == [name]


async def test_a_call_that_is_cut_has_the_arguments_so_far_and_the_reason_of_its_end(
    client: openai.AsyncOpenAI,
) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    message, _ = await ask(client, tool_choice=named)
    ((_, found),) = [(call.id, call.function.arguments) for call in message.tool_calls or ()]
    stop = found[4:7]
    message, reason = await ask(client, tool_choice=named, stop=[stop])
    assert reason == "stop"
    assert [call.function.arguments for call in message.tool_calls or ()] == [found[: found.index(stop)]]
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=named, logprobs=True, **SAMPLED
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = [entry.token for entry in logprobs.content or ()]
    end = len("".join(tokens[: "".join(tokens).index(found)])) + 5  # tokens are bytes
    message, reason = await ask(client, tool_choice=named, max_tokens=end)
    assert reason == "length"
    (call,) = message.tool_calls or ()
    assert found.startswith(call.function.arguments)
    assert call.function.arguments not in ("", found)


async def test_without_a_call_the_answer_is_text_and_none_hides_the_tools(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(model=MODEL, messages=CHAT, **SAMPLED)
    for choice, hides in (("none", True), ("auto", False)):
        fields: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": choice} | SAMPLED
        answer = await client.chat.completions.create(**fields)
        assert answer.usage is not None
        assert plain.usage is not None
        assert (answer.usage.prompt_tokens == plain.usage.prompt_tokens) is hides
        assert (answer.choices[0].message.content == plain.choices[0].message.content) is hides
        assert not answer.choices[0].message.tool_calls


async def test_a_loop_of_tools_goes_on_from_history_in_every_form(client: openai.AsyncOpenAI) -> None:
    call = {"id": "any id", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "any id", "content": [{"type": "text", "text": "noon"}]}
    said: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}]
    said += [{"tool_calls": [call | {"function": {"name": "now", "arguments": given}}]} for given in ("", {})]
    sizes = set()
    for fields in said:
        message: Any = {"role": "assistant", "tool_calls": [call]} | fields
        history: Any = [*CHAT, message, result, result]
        answer = await client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, max_tokens=1)
        assert answer.usage is not None
        sizes.add(answer.usage.prompt_tokens)
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [TOOLS[0] | {"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, None),
        ({"extra_body": {"guided_regex": "a"}}, "tools"),
        ({"extra_body": {"functions": []}}, "functions"),
        ({"extra_body": {"chat_template_kwargs": {"style": 1}}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [CHAT[0] | {"colour": "red"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
    ],
    ids=str,
)
async def test_what_cannot_be_obeyed_is_a_400_with_its_name(
    client: openai.AsyncOpenAI, asked: dict[str, Any], parameter: str | None
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "max_tokens": 3} | asked
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(**fields)
    assert error.value.param == parameter


def test_tools_are_written_into_the_texts_of_a_chat_whose_template_has_none() -> None:
    call = {"id": "1", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    chat = pb.Chat(
        tools=json.dumps(TOOLS),
        messages=[
            pb.ChatMessage(role="system", content="Be brief."),
            pb.ChatMessage(role="assistant", content="Well", fields=json.dumps({"tool_calls": [call, call]})),
            pb.ChatMessage(role="tool", content="noon", fields='{"tool_call_id": "1"}'),
            pb.ChatMessage(role="tool", content="midnight"),
        ],
    )
    write_out_tools(chat)
    assert not chat.tools
    assert not any(message.fields for message in chat.messages)
    system, said, results = chat.messages
    assert system.content.startswith("Be brief.\n\n")
    assert all(json.dumps(tool["function"]) in system.content for tool in TOOLS)
    written = '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>'
    assert said.content == f"Well\n{written}\n{written}"
    assert results.role == "user"
    assert results.content == "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nmidnight\n</tool_response>"
