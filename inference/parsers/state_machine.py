"""`Part`, a parsed part of an output, and `StateMachine`, the base of all parsers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# -- Searching for literals in a growing text.


def find_first(text: str, literals: Sequence[str]) -> tuple[int, str]:
    """Return position and text of the leftmost of `literals`; (-1, "") if none occurs.

    Of two at the same position the longer one is returned.
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
    """Return how many characters at the end of `text` may begin a literal."""
    longest = max(map(len, literals), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(literal.startswith(tail) for literal in literals):
            return size
    return 0


def is_prefix(text: str, literals: Sequence[str]) -> bool:
    """Whether the whole text is a proper prefix of one of the literals."""
    return any(len(text) < len(literal) and literal.startswith(text) for literal in literals)


PartKind = Literal["reasoning", "content", "call", "arguments", "custom", "input"]

#: Kinds of parts that begin a call.
START_KINDS = ("call", "custom")


@dataclass(slots=True)
class Part:
    """A part of an output; parts come in the order of generation.

    Attributes:
        kind: "reasoning" and "content" are text; "call" begins a tool call, whose function name is
            `text`; "arguments" continues the call's JSON. "custom" and "input": the same for a
            call that contains text instead of JSON.
        call: index of the call in the answer, from 0. id: the call's id, only with "call" and
            "custom".
    """

    kind: PartKind
    text: str
    call: int = 0
    id: str = ""


def merge_adjacent(parts: Iterable[Part]) -> list[Part]:
    """Merge adjacent parts of the same kind, and drop empty ones."""
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


# -- A state machine for a growing text.

#: Longer than any mark or header: text that waits beyond this is a run, as of newlines.
LONG = 1024
#: Characters of the end of such a run by which more of it is known.
TAIL = 64


class StateMachine:
    """Splits a growing text into parts, independently of how it was cut into chunks.

    A subclass sets `_state` to a method that consumes what it can of `_buffer`, adds parts to
    `_out`, and returns whether there may be more to consume. `_is_finished` marks the end of the
    text.

    Args:
        state: the initial state.
    """

    def __init__(self, state: Callable[[], bool]) -> None:
        self._buffer = ""
        self._is_finished = False
        self._out: list[Part] = []
        self._state = state
        self._next_size = 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that are final after this text.

        More of a long run is looked at only once the run has grown by an eighth, so that reading
        it takes time in proportion to its length.
        """
        is_run = len(self._buffer) > LONG and set(text) <= set(self._buffer[-TAIL:])
        self._buffer += text
        if is_run and len(self._buffer) < self._next_size:
            return []
        parts = self._run()
        self._next_size = len(self._buffer) * 9 // 8
        return parts

    def flush(self) -> list[Part]:
        """Return the remaining parts at the end of the text."""
        self._is_finished = True
        return self._run()

    def _run(self) -> list[Part]:
        while self._state():
            pass
        out, self._out = self._out, []
        return merge_adjacent(out)
