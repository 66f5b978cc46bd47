"""Responses, as OpenAI's own types read them."""

import json
from collections.abc import Iterable
from typing import Any, get_args

import aiohttp
from http_requests import MODEL
from openai.types.responses import Response, ResponseStreamEvent

_KINDS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
NAMES = set(Response.model_fields) - {
    *("access_programs", "conversation", "image", "input_transformations", "moderation", "prompt", "tool_usage"),
    *("prompt_cache_diagnostics", "prompt_cache_options", "prompt_cache_retention"),
    *("usage", "user", "safety_identifier", "prompt_cache_key"),  # which are no null in OpenAI's schema
}
"""The fields of a response that every answer has."""


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """A response that OpenAI's types accept, with all fields."""
    Response.model_validate(given)
    assert given.keys() >= NAMES
    return given


def read_event(given: dict[str, Any]) -> Any:
    """An event as OpenAI's types have it. Raises ValidationError."""
    return _KINDS[given["type"]].model_validate(given)


async def post(url: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "input": "hello"} | fields
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/responses", json=asked) as answer:
        found: dict[str, Any] = await answer.json()
        return {"status_code": answer.status} | found


async def stream(url: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked."""
    asked = {"model": MODEL, "input": "hello", "stream": True} | fields
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/responses", json=asked) as answer:
        assert answer.status == 200, await answer.text()
        blocks = (await answer.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        first, second, event_id = block.split("\n")
        assert event_id.startswith("id: ")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        assert event["sequence_number"] == number
        read_event(event)
        events.append(event)
    return events


def joined(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream, put together from its deltas alone. Every event must follow OpenAI's order."""
    items: list[dict[str, Any]] = []
    for event in events:
        index = event.get("output_index", -1)
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index == len(items)
                assert all(item["status"] != "in_progress" for item in items)
                items.append(event["item"])
            case "content_part.added":
                assert items[index]["content"] == []
                items[index]["content"] = [event["part"]]
            case "output_text.delta" | "reasoning_text.delta":
                part = items[index]["content"][event["content_index"]]
                part["text"] += event["delta"]
                if "logprobs" in event:
                    part["logprobs"] += event["logprobs"]
            case "output_text.done" | "reasoning_text.done":
                assert items[index]["content"][0]["text"] == event["text"]
                assert items[index]["content"][0].get("logprobs") == event.get("logprobs")
            case "content_part.done":
                assert items[index]["content"] == [event["part"]]
            case "function_call_arguments.delta":
                items[index]["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert items[index]["arguments"] == event["arguments"]
            case "output_item.done":
                for name in {"status", "encrypted_content"} & event["item"].keys():  # known at the item's end
                    items[index][name] = event["item"][name]
                assert items[index] == event["item"]
            case _:
                continue
        assert event.get("item_id", items[index]["id"]) == items[index]["id"]
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of two responses can be compared without their ids."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]
