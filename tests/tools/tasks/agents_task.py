"""openai-agents: two tools, by chat completions. The small model is made to call each, and then to answer."""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

called: list[str] = []


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append("add")
    return 42


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    called.append("weather")
    return "rain"


set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["TANDEM_URL"] + "/v1", api_key="none", max_retries=0)
model = OpenAIChatCompletionsModel(model=os.environ["TANDEM_MODEL"], openai_client=client)


async def main() -> None:
    for choice in ("add", "weather"):
        settings = ModelSettings(temperature=0, max_tokens=64, tool_choice=choice)
        agent = Agent(
            name="helper", instructions="Be brief.", model=model, tools=[add, weather], model_settings=settings
        )
        result = await Runner.run(agent, "What is 17 + 25, and how is the weather in Oslo?", max_turns=6)
        assert result.final_output is not None
        streamed = Runner.run_streamed(agent, "What is 17 + 25?", max_turns=6)
        assert [event async for event in streamed.stream_events()]


asyncio.run(main())
assert {"add", "weather"} <= set(called), called
