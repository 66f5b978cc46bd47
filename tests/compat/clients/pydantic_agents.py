"""pydantic-ai: an agent that calls a tool and answers, whole and streamed, and typed outputs by two of its ways."""

from typing import Any

from checks import MODEL, QUESTION, REPORT, URL, Place, run
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
calls = []


def agent(**more: Any) -> Any:
    return Agent(model, instructions="Be short.", model_settings={"max_tokens": 64, "temperature": 0}, **more)


def caller() -> Any:
    """An agent with a tool that may be called once, and with another tool for its typed output."""
    calls.clear()
    found = agent(output_type=ToolOutput(Place, name="finish"), retries=3)

    async def until_called(_: Any, tool: Any) -> Any:
        return None if calls else tool

    @found.tool_plain(prepare=until_called)
    def weather(city: str) -> str:
        """The weather of a city."""
        calls.append(city)
        return REPORT

    return found


async def tools() -> None:
    assert isinstance((await caller().run(QUESTION)).output, Place)


async def tools_streamed() -> None:
    async with caller().run_stream(QUESTION) as result:
        assert isinstance(await result.get_output(), Place)


async def text_streamed() -> None:
    async with agent().run_stream(QUESTION) as result:
        texts = [text async for text in result.stream_text(delta=True)]
    assert len(texts) > 1 and result.usage.output_tokens


async def native() -> None:
    assert isinstance((await agent(output_type=NativeOutput(Place)).run(QUESTION)).output, Place)


run(tools, tools_streamed, text_streamed, native)
