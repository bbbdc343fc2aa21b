"""OpenAI's Agents SDK over responses and chat completions: whole, streamed, with a tool."""

import asyncio
import json
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

base_url, api_key, name = (
    os.environ[name_of_variable] for name_of_variable in ("BASE_URL", "API_KEY", "MODEL")
)
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
settings = ModelSettings(temperature=0.0, max_tokens=200)
ASK = "What is the capital of France?"
asked: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "sunny"


async def main() -> None:
    """Ask over both APIs."""
    results = {}
    kinds = {
        "responses": OpenAIResponsesModel(name, client),
        "chat": OpenAIChatCompletionsModel(name, client),
    }
    for kind, model in kinds.items():
        agent = Agent(name="guide", model=model, model_settings=settings)
        results[kind] = (await Runner.run(agent, ASK)).final_output
        streamed = Runner.run_streamed(agent, ASK)
        async for _ in streamed.stream_events():
            pass
        results[f"{kind}_streamed"] = streamed.final_output
        forced = ModelSettings(temperature=0.0, max_tokens=200, tool_choice="get_weather")
        guide = Agent(name="guide", model=model, model_settings=forced, tools=[get_weather])
        await Runner.run(guide, "What is the weather in Rome?", max_turns=3)
    results["calls"] = len(asked)
    print(json.dumps(results))


asyncio.run(main())
