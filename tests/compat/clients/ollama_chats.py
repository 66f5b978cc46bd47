"""Ollama's own client: chats whole and streamed, a result of a tool, a form, texts, and the lists of models."""

import json
from typing import Any

import ollama
from checks import MODEL, PARAMETERS, REPORT, TOOL, URL, USER, run

client = ollama.Client(host=URL)
ASK: Any = {"model": MODEL, "options": {"num_predict": 48, "temperature": 0}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]}


def tools() -> None:
    asked = ASK | {"messages": [USER, CALL, {"role": "tool", "tool_name": "weather", "content": REPORT}]}
    whole = client.chat(**asked, tools=[TOOL]).message
    parts = [part.message for part in client.chat(**asked, tools=[TOOL], stream=True)]
    assert whole.content or whole.tool_calls
    assert "".join(part.content or "" for part in parts) == (whole.content or "")


def form() -> None:
    found = client.chat(**ASK, messages=[USER], format=PARAMETERS).message.content
    assert json.loads(found or "").keys() == {"city"}


def texts() -> None:
    whole = client.generate(**ASK, prompt="Once upon").response
    assert whole and whole == "".join(part.response for part in client.generate(**ASK, prompt="Once upon", stream=True))


def models() -> None:
    assert MODEL in [one.model.removesuffix(":latest") for one in client.list().models if one.model]
    assert client.show(MODEL).details


run(tools, form, texts, models)
