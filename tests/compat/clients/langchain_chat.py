"""langchain-openai: a loop of tools, whole and streamed, and structured outputs by each method."""

from typing import Any

from checks import MODEL, QUESTION, REPORT, TOOL, URL, Place, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=64, temperature=0, max_retries=0)


def answer(called: Any) -> list[Any]:
    (call,) = called.tool_calls
    assert call["name"] == "weather" and call["args"]["city"]
    return [HumanMessage(QUESTION), called, ToolMessage(REPORT, tool_call_id=call["id"])]


def tools() -> None:
    first = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    assert chat.invoke(answer(first)).content


def tools_streamed() -> None:
    first, *rest = chat.bind_tools([TOOL], tool_choice="weather").stream(QUESTION)
    for chunk in rest:
        first += chunk
    assert len([chunk for chunk in chat.stream(answer(first)) if chunk.content]) > 1


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Place, method=method).invoke(QUESTION), Place), method


run(tools, tools_streamed, structured)
