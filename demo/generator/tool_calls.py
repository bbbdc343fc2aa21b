"""Conversations with tools: calling one, using its result, and leaving them alone."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from demo.generator.example import Example, Message, assistant, user
from demo.generator.toolbox import TOOLS, Tool


def sample(rng: Random) -> Example:
    """A question that a tool answers: its call, or the answer after its result."""
    tools = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3)))
    return ask(rng, tools[0], offer(rng, tools), finish=rng.random() < 0.5)


def ask(rng: Random, tool: Tool, offered: list[Message], finish: bool) -> Example:
    """A question for the tool. With finish the tool has run, and the answer is in words."""
    arguments = tool.arguments(rng)
    question = rng.choice(tool.asks).format(**arguments)
    more: dict[str, Any] = {"keys": (tool.key(arguments),), "tools": offered}
    messages = [user(question), call(tool.name, arguments)]
    if not finish:
        expect = {"name": tool.name, "arguments": arguments}
        return Example("tools", messages, check="tool_call", expect=expect, **more)
    result, answer, needle = tool.outcome(rng, **arguments)
    messages += [{"role": "tool", "content": json.dumps(result)}, assistant(answer)]
    return Example("tools", messages, needles=(needle,), **more)


def offer(rng: Random, tools: list[Tool]) -> list[Message]:
    """The schemas of the tools, in any order."""
    return [tool.schema(rng) for tool in rng.sample(tools, len(tools))]


def call(name: str, arguments: dict[str, Any]) -> Message:
    """An assistant's turn that calls a tool."""
    function = {"name": name, "arguments": arguments}
    tool_call = {"type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [tool_call]}
