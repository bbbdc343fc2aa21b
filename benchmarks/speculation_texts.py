"""Texts that `benchmarks.speculation` asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.contract.sampling_params import SamplingParams
from engine.offline.llm import LLM

_COUNTRIES = (
    "France", "Poland", "Oman", "Kenya", "Japan", "Peru", "Malta", "China", "Norway", "Laos",
)  # fmt: skip
_CITIES = ("Paris", "London", "Rome", "Madrid", "Oslo", "Vienna")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_HEROES = ("fairy", "pirate", "bear", "snail", "wizard", "queen", "miller", "fox", "robot", "giant")
Conversation = list[dict[str, str]]


def _again(rng: random.Random, llm: LLM) -> Conversation:
    question = _story(rng, llm)
    sampling = SamplingParams(temperature=0, max_tokens=200)
    story = llm.chat([question], sampling, use_tqdm=False)[0].outputs[0].text
    return [*question, {"role": "assistant", "content": story}, *question]


def _story(rng: random.Random, llm: LLM) -> Conversation:
    return [{"role": "user", "content": f"Tell me a story about a {rng.choice(_HEROES)}."}]


def _echo(rng: random.Random, llm: LLM) -> Conversation:
    words = " ".join(rng.sample(_COUNTRIES, 8))  # more is beyond the demo model
    return [{"role": "user", "content": f"Repeat after me: {words}"}]


def _agent(rng: random.Random, llm: LLM) -> Conversation:
    conversation: Conversation = []
    *cities, last = rng.sample(_CITIES, 4)
    for city in cities:
        call = json.dumps({"name": "get_weather", "arguments": {"city": city}})
        weather = json.dumps({"temperature": rng.randrange(30), "condition": "sunny"})
        conversation += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
            {"role": "tool", "content": weather},
        ]
    return [*conversation, {"role": "user", "content": f"What is the weather in {last}?"}]


def _call(rng: random.Random, llm: LLM) -> Conversation:
    city = rng.choice(_CITIES)
    return [{"role": "user", "content": f"What is the weather in {city}?"}]


def _sum(rng: random.Random, llm: LLM) -> Conversation:
    numbers = rng.randrange(10, 99), rng.randrange(10, 99)
    return [{"role": "user", "content": f"What is {numbers[0]} + {numbers[1]}?"}]


def _loop(rng: random.Random, llm: LLM) -> str:
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    start = rng.randrange(len(text) - 400)
    return text[start : start + 400]


#: What the answers are like: as a call before but for a word, as calls that others made, as a story
#: before (perhaps), as the question, like each other, like nothing. "loop" goes on with a page of
#: the documentation, which the demo model can't: it goes round in circles.
KINDS: dict[str, Callable[[random.Random, LLM], Any]] = {
    "again": _again,
    "agent": _agent,
    "call": _call,
    "echo": _echo,
    "loop": _loop,
    "story": _story,
    "sum": _sum,
}
#: Tools that a kind's questions bring.
TOOLS = {"call": [_TOOL]}
