"""/v1/responses with OpenAI's own client: whole and streamed, with tools, forms and stored responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from cluster import halted, until_idle, until_requests
from http_requests import MODEL
from pydantic import BaseModel
from responses_requests import checked, joined, post, stream, without_ids

from pagewire_client import LocalServer

PLAIN: dict[str, Any] = {"model": MODEL, "temperature": 0, "input": "hello"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL: Any = {"type": "function", "name": "f", "parameters": NOTHING, "strict": True}
SEVEN: Any = {"type": "json_schema", "name": "n", "schema": {"const": 7}}
"""The form of an answer after which a model can only end."""
UNIT = {"type": "object", "properties": {"u": {"enum": ["c", "f"]}}, "required": ["u"], "additionalProperties": False}
LOGPROBS = "message.output_text.logprobs"


class Unit(BaseModel):
    u: bool


@pytest.fixture
async def url(tiny_server: LocalServer) -> AsyncIterator[str]:
    yield tiny_server.http_url
    (worker,) = (await until_idle(tiny_server.admin_target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


ASKED: list[dict[str, Any]] = [
    {"max_output_tokens": 12, "include": [LOGPROBS], "top_logprobs": 2, "instructions": "i", "metadata": {"a": "b"}},
    {"max_output_tokens": 60, "text": {"format": {"type": "json_schema", "name": "n", "schema": UNIT, "strict": True}}},
    {"max_output_tokens": 80, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"max_output_tokens": 45, "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
]


@pytest.mark.parametrize("fields", ASKED, ids=["logprobs", "form", "call", "cut call"])
async def test_a_stream_has_the_items_of_a_whole_answer(url: str, fields: dict[str, Any]) -> None:
    fields = {"temperature": 0} | fields
    whole, events = checked(await post(url, **fields)), await stream(url, **fields)
    created, begun, *others, last = events
    is_whole = whole["status"] == "completed"
    assert created["type"] == "response.created"
    assert begun["type"] == "response.in_progress"
    assert last["type"] == ("response.completed" if is_whole else "response.incomplete")
    assert whole["incomplete_details"] == (None if is_whole else {"reason": "max_output_tokens"})
    response = checked(last["response"])
    assert checked(created["response"])["output"] == []
    assert joined(others) == response["output"]
    assert without_ids(response["output"]) == without_ids(whole["output"])
    differing = {"status_code", "id", "created_at", "completed_at", "output", "usage"}
    assert {**response, **dict.fromkeys(differing)} == {**whole, **dict.fromkeys(differing)}
    assert response["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0
    (item,) = response["output"]
    if "include" in fields:
        entries = item["content"][0]["logprobs"]
        assert len(entries) == 12 == len([one for entry in entries for one in entry["top_logprobs"]]) // 2
    if "text" in fields:
        assert json.loads(item["content"][0]["text"])["u"] in ("c", "f")
    if "tools" in fields:
        assert (item["type"], item["name"], item["status"]) == ("function_call", "f", whole["status"])
        assert not is_whole or item["arguments"] == "{}"


async def test_a_loop_of_tools_ends_with_an_answer(client: openai.AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "x"}]
    async with client.responses.stream(
        model=MODEL, input=asked, tools=[TOOL], tool_choice="required", temperature=0, max_output_tokens=80
    ) as events:
        kinds = [event.type async for event in events]
        first = await events.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}
    asked = [*asked, *first.output, result]
    answer = await client.responses.create(
        model=MODEL, input=asked, tools=[TOOL], text={"format": SEVEN}, temperature=0, max_output_tokens=20
    )
    assert (answer.status, answer.output_text) == ("completed", "7"), answer.output
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + 2
    again = await client.responses.create(
        model=MODEL, input=[*asked, *answer.output, *asked], temperature=0, max_output_tokens=1
    )
    assert again.output[0].type == "message"


async def test_an_answer_is_parsed_as_the_class_that_was_asked_for(client: openai.AsyncOpenAI) -> None:
    parsed = await client.responses.parse(model=MODEL, input="hello", text_format=Unit, temperature=0)
    assert isinstance(parsed.output_parsed, Unit)
    async with client.responses.stream(model=MODEL, input="hello", text_format=Unit, temperature=0) as events:
        streamed = await events.get_final_response()
    assert streamed.output_parsed == parsed.output_parsed
    back: Any = [{"role": "user", "content": "hello"}, *parsed.output, {"role": "user", "content": "x"}]
    assert (await client.responses.create(model=MODEL, input=back, max_output_tokens=1)).usage


async def test_a_client_that_leaves_ends_its_request(url: str, tiny_server: LocalServer) -> None:
    async with aiohttp.ClientSession() as session:
        worker, _ = tiny_server.processes
        with halted(worker):
            async with asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(session.post(f"{url}/v1/responses", json=PLAIN | {"stream": True}))
                await until_requests(tiny_server.admin_target, 1)
                asking.cancel()
                await until_requests(tiny_server.admin_target, 0)


async def test_a_stored_response_can_be_continued_shown_listed_and_deleted(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}
    first = await client.responses.create(**fields, input="hello", instructions="i", store=True)
    assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
    events = await client.responses.create(
        **fields, input="more", previous_response_id=first.id, store=True, stream=True
    )
    *_, last = [event async for event in events]
    assert last.type == "response.incomplete"
    second = last.response
    said: list[Any] = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "more"}]
    written_out = await client.responses.create(**fields, input=said)
    assert written_out.output_text == second.output_text
    assert written_out.usage is not None
    assert second.usage is not None
    assert written_out.usage.input_tokens == second.usage.input_tokens
    (output,) = first.output
    said[1] = {"type": "item_reference", "id": output.id}
    by_reference = await client.responses.create(**fields, input=said)
    assert by_reference.output_text == second.output_text
    with pytest.raises(openai.BadRequestError, match="twice"):
        await client.responses.create(**fields, input=[said[1], said[1]])

    page = await client.responses.input_items.list(second.id, order="asc", limit=2)
    assert page.has_next_page()
    listed: list[Any] = [item async for item in page]
    assert [(item.role, item.content[0].text) for item in listed] == [
        ("user", "hello"),
        ("assistant", first.output_text),
        ("user", "more"),
    ]
    newest = await client.responses.input_items.list(second.id)
    assert [item.id for item in newest.data] == [item.id for item in reversed(listed)]
    with pytest.raises(openai.BadRequestError, match="is no item of a stored response"):  # the output's ids are others
        await client.responses.create(**fields, input=[{"type": "item_reference", "id": listed[0].id}])

    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        await client.responses.input_items.list(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(**fields, input="x", previous_response_id=first.id)
    continued = await client.responses.create(**fields, input="x", previous_response_id=second.id)
    assert continued.previous_response_id == second.id


async def test_numbers_that_no_json_can_express_are_refused_where_the_answer_repeats_them(url: str) -> None:
    for number in ("NaN", "1e400"):
        part = f'{{"type": "input_text", "text": "a", "annotations": [{number}]}}'
        bodies = (
            f'{{"input": "a", "tools": [{{"type": "function", "name": "f", "output_schema": {{"a": {number}}}}}]}}',
            f'{{"store": true, "input": [{{"role": "user", "content": [{part}]}}]}}',
        )
        for body in bodies:
            headers = {"Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{url}/v1/responses", data=body) as answer,
            ):
                assert answer.status == 400, body


async def test_a_response_is_not_stored_unless_asked(client: openai.AsyncOpenAI, url: str) -> None:
    answer = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        await client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        await client.responses.delete(answer.id)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"typo": 1}, "typo"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"include": ["unknown"]}, "include.0"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text.format"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"input": []}, "input"),
    ({"input": "x" * 7000}, "input"),
    ({"input": [{"role": "user", "content": "x", "weight": 1}]}, "input[0].weight"),
    ({"input": [{"role": "user", "content": "x" * (1 << 19)}], "store": True}, "store"),
    ({"model": "gpt-4o"}, "model"),
    ({"chat_template_kwargs": {"no_such_variable": 1}}, "chat_template_kwargs"),
    ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "text.format"),
]


async def test_vllms_further_fields_mean_the_same_as_in_chats(url: str) -> None:
    found = await post(url, structured_outputs={"regex": "ab{9}"}, stop="bbb", include_stop_str_in_output=True)
    assert found["output"][-1]["content"][0]["text"] == "abbb"
    found = await post(url, ignore_eos=True, max_output_tokens=16, logit_bias={"70": 100.0}, top_k=1, seed=1)
    assert len({*found["output"][-1]["content"][0]["text"]}) == 1


async def test_what_cannot_be_honoured_is_refused_by_its_name(url: str) -> None:
    for fields, name in REFUSED:
        for streamed in (False, True):
            found = await post(url, stream=streamed, **fields)
            assert found["status_code"] == (404 if "model" in fields else 400), fields
            assert found["error"]["param"] == name, found


async def test_a_call_that_was_cut_may_come_back(url: str) -> None:
    called = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "', "status": "incomplete"}
    told = {"type": "function_call_output", "call_id": "1", "output": "x"}
    found = await post(url, input=[{"role": "user", "content": "x"}, called, told], max_output_tokens=1)
    assert found["status_code"] == 200
