"""openai-agents: an agent that calls a tool and answers, whole and streamed, and an answer with a type."""

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from checks import MODEL, QUESTION, REPORT, URL, Place, run
from openai import AsyncOpenAI

set_tracing_disabled(True)
calls = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    calls.append(city)
    return REPORT


def agent(choice: str | None = "required", **more: Any) -> Any:
    calls.clear()
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
    settings = ModelSettings(max_tokens=64, temperature=0, tool_choice=choice)
    return Agent(name="guide", instructions="Be short.", model=model, model_settings=settings, **more)


async def tools() -> None:
    result = await Runner.run(agent(tools=[weather]), QUESTION, max_turns=4)
    assert calls and result.final_output


async def tools_streamed() -> None:
    result = Runner.run_streamed(agent(tools=[weather]), QUESTION, max_turns=4)
    kinds = {event.name async for event in result.stream_events() if event.type == "run_item_stream_event"}
    assert calls and {"tool_called", "tool_output", "message_output_created"} <= kinds, kinds


async def typed() -> None:
    assert isinstance((await Runner.run(agent(None, output_type=Place), QUESTION)).final_output, Place)


run(tools, tools_streamed, typed)
