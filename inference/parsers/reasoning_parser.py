"""The base of reasoning parsers, which also implements the usual format: tags around reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from inference.parsers.state_machine import (
    Part,
    StateMachine,
    find_first,
    is_prefix,
    partial_suffix_length,
)


@dataclass(frozen=True)
class ReasoningMarkers:
    """Texts by which the engine detects reasoning.

    Attributes:
        ends: texts that each end the reasoning. start: beginning of an output that has reasoning,
            "" for none.
        close: text that the engine inserts to end the reasoning; it ends with one of `ends`.
    """

    ends: tuple[str, ...]
    start: str
    close: str


class ReasoningParser(StateMachine):
    """Splits one output into parts of the kinds "reasoning" and "content".

    White space next to a tag is dropped.

    Attributes:
        name, template_marks, markers: as in `ToolCallParser`; `markers` defaults to the tags.
        starts, ends: spellings of the tags that begin and end the reasoning.
        calls: texts that begin a call. One inside the reasoning begins a call if no end tag
            follows, since some models call a function without closing the reasoning.
        starts_in_reasoning: whether an output begins with reasoning if neither the prompt nor the
            output says so. template_opens: the same if the template's variables turn thinking on.
        template_switches: variables of the chat template that turn thinking on and off.

    Args:
        inside: whether the prompt ends inside the reasoning; None if unknown.
    """

    name: ClassVar[str]
    template_marks: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    calls: ClassVar[tuple[str, ...]] = ()
    starts_in_reasoning: ClassVar[bool] = False
    template_opens: ClassVar[bool] = False
    template_switches: ClassVar[tuple[str, ...]] = ("enable_thinking", "thinking")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "markers" not in cls.__dict__:
            cls.markers = (*cls.starts, *cls.ends, *cls.calls)

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__(self._content if inside is False else self._begin)
        self._trim = True
        self._assumed = self.starts_in_reasoning if inside is None else inside
        self._seen = 0

    @classmethod
    def prompt_opens_reasoning(cls, tail: str) -> bool | None:
        """Whether a prompt ends inside the reasoning or after it (False); None if unknown."""
        text = tail.rstrip()
        if text.endswith(tuple(start.rstrip() for start in cls.starts)):
            return True
        return False if text.endswith(cls.ends) else None

    @classmethod
    def switched(cls, variables: Mapping[str, Any]) -> bool | None:
        """Whether variables of a chat template turn thinking on or off; None if none does."""
        if variables.get("reasoning_effort") in ("none", "no_think"):
            return False
        switches = [_is_on(variables[name]) for name in cls.template_switches if name in variables]
        values = [on for on in switches if on is not None]
        return any(values) if values else None

    @classmethod
    def marks(cls, *, constrained: bool, calls: bool) -> ReasoningMarkers:
        """Return the markers for the engine. `constrained`: the answer has a constrained format,
        which may be that of required calls.
        """
        return ReasoningMarkers(cls.ends, cls.starts[0] if cls.starts else "", cls.ends[0])

    def _begin(self) -> bool:
        """Parse the output's beginning: a start tag, or text inside or after the reasoning."""
        rest = self._buffer.lstrip()
        tags = self.starts if self._assumed else self.starts + self.ends
        if not self._is_finished and (not rest or is_prefix(rest, tags)):
            return False
        tag = _leading_tag(rest, tags)
        if tag:
            self._buffer = rest[len(tag) :]
        self._trim = bool(tag) or self._assumed
        inside = tag in self.starts or (self._assumed and not tag)
        self._state = self._reasoning if inside else self._content
        return bool(tag or self._buffer)

    def _reasoning(self) -> bool:
        position, tag = find_first(self._buffer, self.ends + self.calls)
        if tag:
            self._emit("reasoning", self._buffer[:position].rstrip())
            if tag in self.ends:
                return self._skip_to(position + len(tag))
            self._buffer = self._buffer[len(self._buffer[:position].rstrip()) :]
            self._seen, self._state = 0, self._call
            return True
        keep = (
            0 if self._is_finished else partial_suffix_length(self._buffer, self.ends + self.calls)
        )
        head = self._buffer[: len(self._buffer) - keep]
        text = head if self._is_finished else head.rstrip()
        self._emit("reasoning", text)
        self._buffer = self._buffer[len(text) :]
        return False

    def _call(self) -> bool:
        """After a call's start inside the reasoning: it is a call unless an end tag follows."""
        position, tag = find_first(self._buffer[self._seen :], self.ends)
        if tag:
            position += self._seen
            self._emit("reasoning", self._buffer[:position].rstrip())
            return self._skip_to(position + len(tag))
        if self._is_finished:
            return self._skip_to(0)
        self._seen = max(0, len(self._buffer) - max(map(len, self.ends)) + 1)
        return False

    def _skip_to(self, position: int) -> bool:
        """End the reasoning; the answer begins at this position."""
        self._buffer = self._buffer[position:]
        self._trim, self._state = True, self._content
        return True

    def _content(self) -> bool:
        text, self._buffer = self._buffer, ""
        self._emit("content", text)
        return False

    def _emit(self, kind: str, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            self._out.append(Part("reasoning" if kind == "reasoning" else "content", text))


def _leading_tag(text: str, tags: tuple[str, ...]) -> str:
    """Return the longest tag that the text begins with, or ""."""
    return max((tag for tag in tags if text.startswith(tag)), key=len, default="")


def _is_on(value: Any) -> bool | None:
    """Return a switch's value: some templates use words; "adaptive" leaves it to the model."""
    if value in (None, "adaptive"):
        return None
    return bool(value) and value not in ("disabled", "off")
