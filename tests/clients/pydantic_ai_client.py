"""Pydantic AI over chat completions, responses and messages: whole, streamed, with a form."""

import asyncio
import json
import os
from typing import Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

base_url, api_key, name = (
    os.environ[name_of_variable] for name_of_variable in ("BASE_URL", "API_KEY", "MODEL")
)
provider = OpenAIProvider(base_url=base_url, api_key=api_key)
anthropic = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
chat = OpenAIChatModel(name, provider=provider)
responses = OpenAIResponsesModel(name, provider=provider)
messages = AnthropicModel(name, provider=AnthropicProvider(anthropic_client=anthropic))
settings = {"temperature": 0.0, "max_tokens": 200}
ASK = "What is the capital of France?"


class Answer(BaseModel):
    """Words are given: the demo model isn't trained on JSON."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


async def main() -> None:
    """Ask each of them."""
    outputs = {}
    for kind, model in (("chat", chat), ("responses", responses), ("messages", messages)):
        outputs[kind] = (await Agent(model, model_settings=settings).run(ASK)).output
    async with Agent(chat, model_settings=settings).run_stream(ASK) as stream:
        outputs["streamed"] = await stream.get_output()
    formed = Agent(chat, output_type=NativeOutput(Answer), model_settings=settings)
    outputs["structured"] = sorted((await formed.run(ASK)).output.model_dump())
    print(json.dumps(outputs))


asyncio.run(main())
