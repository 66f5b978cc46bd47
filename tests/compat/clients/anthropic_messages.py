"""Anthropic's own client: a loop of tools, whole and streamed, a form, and the count of tokens."""

import json
from typing import Any

from anthropic import Anthropic
from checks import MODEL, PARAMETERS, REPORT, URL, USER, run

messages = Anthropic(base_url=URL, api_key="none", max_retries=0).messages
TOOL: Any = {"name": "weather", "description": "The weather of a city.", "input_schema": PARAMETERS}
ASK: Any = {"model": MODEL, "max_tokens": 64, "tools": [TOOL]}
FIRST: Any = {"messages": [USER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def second(called: Any) -> Any:
    """The request behind a message with one call, which is sent back as it came."""
    assert called.stop_reason == "tool_use"
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert call.input.keys() == {"city"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": REPORT}]}
    answered = [USER, {"role": "assistant", "content": called.content}, result]
    return {"messages": answered, "tool_choice": {"type": "none"}}


def tools() -> None:
    assert messages.create(**ASK, **second(messages.create(**ASK, **FIRST))).content[0].text


def tools_streamed() -> None:
    with messages.stream(**ASK, **FIRST) as stream:
        called = stream.get_final_message()
    with messages.stream(**ASK, **second(called)) as stream:
        texts = list(stream.text_stream)
        assert len(texts) > 1 and "".join(texts) == stream.get_final_text()


def form() -> None:
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    (block,) = messages.create(model=MODEL, max_tokens=64, messages=[USER], output_config=form).content  # type: ignore
    assert json.loads(block.text).keys() == {"city"}


def counts() -> None:
    used = messages.create(model=MODEL, max_tokens=1, messages=[USER]).usage
    count = messages.count_tokens(model=MODEL, messages=[USER]).input_tokens
    assert count == used.input_tokens + (used.cache_read_input_tokens or 0)


run(tools, tools_streamed, form, counts)
