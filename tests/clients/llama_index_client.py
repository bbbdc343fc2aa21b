"""LlamaIndex over chat completions: whole, streamed, with a tool, structured."""

import json
import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

base_url, api_key, model = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
llm = OpenAILike(
    model=model,
    api_base=base_url,
    api_key=api_key,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=2048,
    max_tokens=200,
    temperature=0.0,
    max_retries=0,
)
ask = [ChatMessage(role="user", content="What is the capital of France?")]


class Capital(BaseModel):
    """The capital of a country. (Words are given: the demo model isn't trained on JSON.)"""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def get_weather(city: Literal["Rome", "Paris"]) -> str:
    """Get the weather of a city."""
    return f"Sun in {city}."


tool = FunctionTool.from_defaults(get_weather)
called = llm.chat_with_tools([tool], user_msg="Weather in Rome?", tool_required=True)
structured = llm.as_structured_llm(Capital).chat(ask)
print(
    json.dumps(
        {
            "whole": llm.chat(ask).message.content,
            "streamed": "".join(chunk.delta or "" for chunk in llm.stream_chat(ask)),
            "completed": llm.complete("What is the capital of France?").text,
            "calls": [
                call.tool_name
                for call in llm.get_tool_calls_from_response(called, error_on_no_tool_call=False)
            ],
            "structured": sorted(structured.raw.model_dump()),
        }
    )
)
