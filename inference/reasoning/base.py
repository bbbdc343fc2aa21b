"""What a reasoning parser is, and the usual one: tags around the reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference.parsing.literals import first_of, is_beginning, may_begin
from inference.parsing.machine import StateMachine
from inference.parsing.parts import Part


@dataclass(frozen=True)
class Marks:
    """Texts by which the engine tells reasoning.

    Attributes:
        ends: each ends it. start: what an output begins with that has reasoning, "" for nothing.
        close: what ends it by force; ends with one of `ends`.
    """

    ends: tuple[str, ...]
    start: str
    close: str


class ReasoningParser(StateMachine):
    """Splits one output into parts of the kinds "reasoning" and "content".

    White space next to a tag belongs to neither.

    Attributes:
        name, template_marks, markers: as a `ToolParser` has them.
        starts, ends: what begins and what ends the reasoning, in any of these spellings.
        assumed: whether an output is reasoning from its first character on, when neither the
            prompt nor the output says so.

    Args:
        inside: whether the prompt ends inside the reasoning; None when its end doesn't tell.
    """

    name: ClassVar[str]
    template_marks: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    assumed: ClassVar[bool] = False

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__(self._content if inside is False else self._begin)
        self._trim = True
        self._assumed = self.assumed if inside is None else inside

    @classmethod
    def prompt_is_inside(cls, tail: str) -> bool | None:
        """What the end of a prompt says: inside the reasoning, past it, or nothing."""
        text = tail.rstrip()
        if cls.starts and text.endswith(cls.starts):
            return True
        return False if cls.ends and text.endswith(cls.ends) else None

    @classmethod
    def marks(cls, *, constrained: bool, calls: bool) -> Marks:
        """How the engine tells the reasoning, where the answer has a form (`constrained`), which
        may be that of required calls.
        """
        return Marks(cls.ends, cls.starts[0] if cls.starts else "", cls.ends[0])

    def _begin(self) -> bool:
        """Nothing has come yet: a start tag, or already what stands inside or after it."""
        rest = self._held.lstrip()
        if rest.startswith(self.starts):
            _, tag = first_of(rest, self.starts)
            self._held = rest[len(tag) :]
            self._state = self._reasoning
            return True
        if not self._ended and (not rest or is_beginning(rest, self.starts)):
            return False
        self._trim = self._assumed
        self._state = self._reasoning if self._assumed else self._content
        return bool(self._held)

    def _reasoning(self) -> bool:
        place, tag = first_of(self._held, self.ends)
        if tag:
            self._emit("reasoning", self._held[:place].rstrip())
            self._held = self._held[place + len(tag) :]
            self._trim, self._state = True, self._content
            return True
        keep = 0 if self._ended else may_begin(self._held, self.ends)
        head = self._held[: len(self._held) - keep]
        shown = head if self._ended else head.rstrip()
        self._emit("reasoning", shown)
        self._held = self._held[len(shown) :]
        return False

    def _content(self) -> bool:
        held, self._held = self._held, ""
        self._emit("content", held)
        return False

    def _emit(self, kind: str, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            self._out.append(Part("reasoning" if kind == "reasoning" else "content", text))
