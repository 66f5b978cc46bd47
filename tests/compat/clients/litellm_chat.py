"""litellm: a loop of tools, whole and streamed, a form, and its text completions."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import waits for GitHub
import litellm
from checks import FIRST, MODEL, PARAMETERS, URL, USER, run, second

ASK: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "max_tokens": 48, "num_retries": 0}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def tools() -> None:
    first = litellm.completion(**FIRST, **ASK)
    assert litellm.completion(**second(first.choices[0].message), **ASK).choices[0].message.content


def tools_streamed() -> None:
    first = litellm.stream_chunk_builder(list(litellm.completion(**FIRST, **STREAM, **ASK)), messages=[USER])
    chunks = list(litellm.completion(**second(first.choices[0].message), **STREAM, **ASK))
    assert first.usage.completion_tokens
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def form() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS, "strict": True}}
    found = litellm.completion(messages=[USER], response_format=schema, **ASK)
    assert json.loads(found.choices[0].message.content).keys() == {"city"}


def text() -> None:
    ask = ASK | {"model": f"text-completion-openai/{MODEL}", "api_key": "none"}
    assert litellm.text_completion(prompt="Once upon", **ask).choices[0].text


run(tools, tools_streamed, form, text)
