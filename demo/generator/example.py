"""A generator's example: a conversation, its question, and how to judge the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]


@dataclass(slots=True)
class Example:
    """One conversation whose last message is the answer, or a plain text to be continued."""

    topic: str
    messages: list[Message]  # the last one is the assistant's answer
    keys: tuple[str, ...]  # one for each question in it: what the held-out split is decided on
    needles: tuple[str, ...] = ()  # the words that a right answer has
    check: str = "words"  # the name of a judge in demo.judge
    tools: list[Message] = field(default_factory=list)
    plain: tuple[str, str] | None = None  # prompt and continuation, without chat markup
    expect: Any = None  # a tool call's name and arguments

    @property
    def prompt(self) -> list[Message]:
        """The messages before the answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> Message:
        """The answer to be learned."""
        return self.messages[-1]


def user(text: str) -> Message:
    """A user's turn."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant's turn."""
    return {"role": "assistant", "content": text}


def exchange(topic: str, question: str, answer: str, *needles: str, **more: Any) -> Example:
    """A single question and its answer, held out by the question's wording."""
    more.setdefault("keys", (question,))
    return Example(topic, [user(question), assistant(answer)], needles=needles, **more)


def casual(rng: Random, text: str) -> str:
    """The text as people type it: sometimes in lower case, sometimes without the final mark."""
    if rng.random() < 0.2:
        text = text.lower()
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    return text
