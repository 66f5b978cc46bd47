"""What the clients' programs share. A program prints a line for each check: its result and its name."""

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL, MODEL = os.environ.get("PAGEWIRE_URL", ""), os.environ.get("PAGEWIRE_MODEL", "")
QUESTION, REPORT = "What is the weather in Paris?", "18 degrees and sunny"
USER: Any = {"role": "user", "content": QUESTION}
CITY = {"type": "string", "maxLength": 12}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}
FIRST: Any = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


class Place(BaseModel):
    """A place."""

    kind: Literal["city", "river"]


def second(called: Any) -> dict[str, Any]:
    """The request behind an assistant's message with one call, which is sent back as the client made it."""
    (call,) = called.tool_calls
    assert json.loads(call.function.arguments).keys() == {"city"}, call
    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    return {"messages": [USER, called, result], "tools": [TOOL], "tool_choice": "none"}


def run(*checks: Callable[[], Any]) -> None:
    for check in checks:
        try:
            if inspect.iscoroutine(result := check()):
                asyncio.run(result)
            print(f"pass {check.__name__}", flush=True)
        except Exception as error:
            print(f"fail {check.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
