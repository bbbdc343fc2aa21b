"""The mixture of topics, drawn for one side of the split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Literal

from demo.generator import (
    arithmetic,
    calendar,
    capitals,
    completions,
    echo,
    greetings,
    limits,
    memory,
    stories,
    system,
    tool_calls,
)
from demo.generator.example import Example, Message
from demo.generator.splits import held_out
from demo.generator.toolbox import TOOLS, Tool

Split = Literal["train", "test"]

# Shares of the conversations: what is hard to learn is seen more often.
TOPICS: dict[str, tuple[Callable[[Random], Example], float]] = {
    "greetings": (greetings.sample, 8),
    "capitals": (capitals.sample, 16),
    "arithmetic": (arithmetic.sample, 14),
    "calendar": (calendar.sample, 8),
    "tools": (tool_calls.sample, 4),
    "stories": (stories.sample, 4),
    "limits": (limits.sample, 6),
    "memory": (memory.sample, 8),
    "system": (system.sample, 9),
    "echo": (echo.sample, 8),
    "completions": (completions.sample, 9),
}
SINGLE = ("greetings", "capitals", "arithmetic", "arithmetic", "calendar", "limits")


def draw(topic: str, rng: Random, split: Split) -> Example:
    """An example of the topic that belongs to the split."""
    sample, _ = TOPICS[topic]
    while True:
        example = sample(rng)
        if _belongs(example, split):
            return example


def _belongs(example: Example, split: Split) -> bool:
    """In training nothing is held out. In the test it is the question that counts, the last one."""
    if split == "train":
        return not any(map(held_out, example.keys))
    return held_out(example.keys[-1])


def stream(seed: int, split: Split = "train") -> Iterator[Example]:
    """Examples of every topic by their shares, without end."""
    rng = Random(seed)
    names, shares = list(TOPICS), [share for _, share in TOPICS.values()]
    while True:
        topic = rng.choices((*names, "sums", "errand"), (*shares, 4, 4))[0]
        yield _several(topic, rng, split) if topic in SEVERAL else draw(topic, rng, split)


def _sums(rng: Random, split: Split) -> list[Example]:
    """Several sums in a row: the cheapest way to see many."""
    return [draw("arithmetic", rng, split) for _ in range(rng.randint(3, 6))]


def _errand(rng: Random, split: Split) -> list[Example]:
    """Several questions under one offer of tools, some of which need none."""
    tools = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3)))
    offered = tool_calls.offer(rng, tools)
    turns = [_errand_turn(rng, tools, offered) for _ in range(rng.randint(2, 4))]
    return [turn for turn in turns if _belongs(turn, split)] or _errand(rng, split)


def _errand_turn(rng: Random, tools: list[Tool], offered: list[Message]) -> Example:
    if rng.random() < 0.65:
        return tool_calls.ask(rng, rng.choice(tools), offered, finish=True)
    names = ["greetings", "capitals", "calendar"]
    if not {"add", "multiply"} & {tool.name for tool in tools}:
        names.append("arithmetic")
    example = draw(rng.choice(names), rng, "train")
    example.tools = offered
    return example


def echoes(seed: int) -> Iterator[Example]:
    """Long echoes only. A model that can copy learns the rest much faster."""
    rng = Random(seed)
    while True:
        example = echo.sample(rng, longest=20)
        if _belongs(example, "train"):
            yield example


SEVERAL = {"sums": _sums, "errand": _errand}


def _several(topic: str, rng: Random, split: Split) -> Example:
    return join(SEVERAL[topic](rng, split))


def join(examples: list[Example]) -> Example:
    """One conversation of several: every answer in it is learned."""
    last = examples[-1]
    messages = [message for example in examples for message in example.messages]
    keys = tuple(key for example in examples for key in example.keys)
    return Example(
        "joined", messages, keys, last.needles, last.check, tools=last.tools, expect=last.expect
    )


def long_conversation(rng: Random, turns: int) -> Example:
    """A long conversation of unrelated questions, from training."""
    return join([draw(rng.choice(SINGLE), rng, "train") for _ in range(turns)])
