"""Lets the model call a function, with OpenAI's client: pip install openai; pagewire serve"""

import json
import os

from openai import OpenAI


def weather(city: str) -> str:
    return {"Paris": "rain", "Rome": "sun"}[city]


PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}

url, key = os.environ.get("PAGEWIRE_URL", "http://127.0.0.1:8000"), os.environ.get("PAGEWIRE_CLIENT_API_KEY", "none")
with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    first = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
    call = first.choices[0].message.tool_calls[0]
    result = weather(**json.loads(call.function.arguments))
    print(call.function.name, call.function.arguments, result)
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    last = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=64
    )
    print(last.choices[0].message.content)
