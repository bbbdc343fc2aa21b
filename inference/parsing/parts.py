"""`Part`: what a piece of a model's text turned out to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PartKind = Literal["reasoning", "content", "call", "arguments", "custom", "input"]

#: A call begins with one of these.
BEGINNINGS = ("call", "custom")


@dataclass(slots=True)
class Part:
    """A piece of an answer, in the order in which the model wrote it.

    Attributes:
        kind: "reasoning" and "content" are text; "call" begins a tool call, `text` is the
            function's name; "arguments" is more of a call's JSON. "custom" and "input": the
            same of a call that holds a text instead of JSON.
        call: which of the answer's calls, from 0. id: the call's, with "call" and "custom" alone.
    """

    kind: PartKind
    text: str
    call: int = 0
    id: str = ""


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind as one part, and without empty ones."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if (
            last is not None
            and part.kind not in BEGINNINGS
            and last.kind == part.kind
            and last.call == part.call
        ):
            result[-1] = Part(last.kind, last.text + part.text, last.call)
        elif part.text or part.kind in BEGINNINGS:
            result.append(part)
    return result
