"""OpenAI's own client: tools, forms, the helper for streams, and log-probabilities."""

from typing import Any

from checks import FIRST, MODEL, TOOL, URL, USER, Place, run, second
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
chats = client.chat.completions
ASK: dict[str, Any] = {"model": MODEL, "max_completion_tokens": 48}


def tools() -> None:
    first = chats.create(**FIRST, **ASK).choices[0]
    assert first.finish_reason == "tool_calls"
    assert chats.create(**second(first.message), **ASK).choices[0].message.content


def tools_streamed() -> None:
    with chats.stream(**FIRST, **ASK) as stream:
        assert "tool_calls.function.arguments.done" in {event.type for event in stream}
        called = stream.get_final_completion().choices[0].message
    messages = second(called)["messages"]  # with strict tools, the helper refuses a text that is cut by length
    with chats.stream(messages=messages, stream_options={"include_usage": True}, **ASK) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == final.choices[0].message.content and final.usage


def named_tool() -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    second(chats.create(messages=[USER], tools=[TOOL], tool_choice=named, **ASK).choices[0].message)


def parsed() -> None:
    assert chats.parse(messages=[USER], response_format=Place, **ASK).choices[0].message.parsed
    with chats.stream(messages=[USER], response_format=Place, **ASK) as stream:
        assert stream.get_final_completion().choices[0].message.parsed


def logprobs() -> None:
    for choice in chats.create(messages=[USER], logprobs=True, top_logprobs=2, n=2, **ASK).choices:
        assert choice.logprobs and all(len(one.top_logprobs) == 2 for one in choice.logprobs.content or [])


def completions_and_models() -> None:
    found = client.completions.create(model=MODEL, prompt=["one two", "three"], max_tokens=4, logprobs=1, echo=True)
    assert len(found.choices) == 2 and found.choices[0].text.startswith("one two")
    assert MODEL in [one.id for one in client.models.list()] and client.models.retrieve(MODEL).id == MODEL


run(tools, tools_streamed, named_tool, parsed, logprobs, completions_and_models)
