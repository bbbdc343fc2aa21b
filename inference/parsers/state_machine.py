"""`Part`: what a piece of a model's text turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# -- Looking for fixed texts in a text that is still growing.


def find_first(text: str, literals: Sequence[str]) -> tuple[int, str]:
    """Where the leftmost of `literals` begins, and which; (-1, "") for none.

    Of two that begin at the same place it is the longer one.
    """
    first, match = -1, ""
    for literal in literals:
        index = text.find(literal)
        if index >= 0 and (
            first < 0 or index < first or (index == first and len(literal) > len(match))
        ):
            first, match = index, literal
    return first, match


def partial_suffix_length(text: str, literals: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a literal."""
    longest = max(map(len, literals), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(literal.startswith(tail) for literal in literals):
            return size
    return 0


def is_prefix(text: str, literals: Sequence[str]) -> bool:
    """Whether a whole text is the (shorter) beginning of one of the literals."""
    return any(len(text) < len(literal) and literal.startswith(text) for literal in literals)


PartKind = Literal["reasoning", "content", "call", "arguments", "custom", "input"]

#: A call begins with one of these.
START_KINDS = ("call", "custom")


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


def merge_adjacent(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind as one part, and without empty ones."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if (
            last is not None
            and part.kind not in START_KINDS
            and last.kind == part.kind
            and last.call == part.call
        ):
            result[-1] = Part(last.kind, last.text + part.text, last.call)
        elif part.text or part.kind in START_KINDS:
            result.append(part)
    return result


# -- A state machine over a text that grows.


class StateMachine:
    """Takes a text apart; how it is cut into pieces changes nothing.

    A subclass sets `_state` to a method that takes what it can from `_buffer` into `_out`, and
    returns whether there may be more to take. `_is_finished` tells that no more text will come.

    Args:
        state: to begin with.
    """

    def __init__(self, state: Callable[[], bool]) -> None:
        self._buffer = ""
        self._is_finished = False
        self._out: list[Part] = []
        self._state = state

    def push(self, text: str) -> list[Part]:
        """What is certain after this text."""
        self._buffer += text
        return self._run()

    def flush(self) -> list[Part]:
        """The rest, now that the text has ended."""
        self._is_finished = True
        return self._run()

    def _run(self) -> list[Part]:
        while self._state():
            pass
        out, self._out = self._out, []
        return merge_adjacent(out)
