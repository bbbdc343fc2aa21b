"""langchain-openai: whole, streamed, with tools, structured."""

import json
import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

base_url, api_key, model = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model, temperature=0, max_retries=0)


@tool
def get_weather(city: Literal["Rome", "Paris"]) -> str:
    """Get the weather of a city."""
    return f"Sun in {city}."


class Capital(BaseModel):
    """The capital of a country. (Words are given: the demo model isn't trained on JSON.)"""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


question = "What is the capital of France?"
called = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Rome?")
structured = chat.with_structured_output(Capital, method="json_schema").invoke(question)
print(
    json.dumps(
        {
            "whole": chat.invoke(question).content,
            "streamed": "".join(chunk.content for chunk in chat.stream(question)),
            "calls": [[call["name"], sorted(call["args"])] for call in called.tool_calls],
            "structured": sorted(structured.model_dump()),
        }
    )
)
