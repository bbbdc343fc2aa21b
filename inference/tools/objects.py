"""Parsers for calls that are JSON objects, alone or in a list."""

from __future__ import annotations

from typing import ClassVar

from inference.tools.base import ToolParser
from inference.tools.layout import Layout


class ObjectListParser(ToolParser):
    """A list of call objects (or one object) after an opening text.

    Attributes:
        openers: each opens a list. closers: what may stand after it.
    """

    openers: ClassVar[tuple[str, ...]]
    closers: ClassVar[tuple[str, ...]] = ()

    def _text(self) -> bool:
        self._opening, self._began = self._find(*self.openers), False
        if self._opening:
            self._state = self._list_start
        return bool(self._opening)

    def _list_start(self) -> bool:
        """The list's bracket, or the brace of an object without a list."""
        rest = self._held.lstrip()
        if not rest and not self._ended:
            return False
        if rest.startswith("{"):
            self._state = self._call_object
            return True
        if not rest.startswith("["):
            return self._no_list()
        self._take(len(self._held) - len(rest) + 1)
        self._state = self._item
        return True

    def _no_list(self) -> bool:
        return self._fail(self._opening)

    def _take(self, size: int) -> None:
        """Characters that belong to the opening, in case that it is none."""
        self._opening += self._held[:size]
        self._held = self._held[size:]

    def _item(self) -> bool:
        """Before an object of the list, or at the list's end."""
        rest = self._held.lstrip(", \t\r\n")
        if not rest and not self._ended:
            return False
        self._take(len(self._held) - len(rest))
        if rest.startswith("{"):
            self._state = self._call_object
        elif rest.startswith("]") and self._began:
            self._held = rest[1:]
            self._end_list()
        elif self._began:
            self._end_list()
        else:
            return self._fail(self._opening)
        return True

    def _call_object(self) -> bool:
        before = self._num_calls
        going = self._in_object("" if self._began else self._opening, self._next)
        self._began = self._began or self._num_calls > before
        return going

    #: Whether the list has had a call.
    _began = False
    _opening = ""

    def _next(self) -> bool:
        self._state = self._item
        return True

    def _end_list(self) -> None:
        self._opening = ""
        self._state = self._after_list

    def _after_list(self) -> bool:
        """What closes the list, in the model's own way."""
        for mark in self.closers:
            found = self._skip(mark)
            if found is None:
                return False
            if found:
                return True
        return self._then(self._text)


class GraniteParser(ObjectListParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`."""

    name = "granite"
    template_marks: ClassVar[tuple[str, ...]] = ("<|tool_call|>",)
    openers = ("<|tool_call|>", "<tool_call>")
    markers = openers
    layout = Layout(
        open="<|tool_call|>[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]",
        trigger="<|tool_call|>",
    )


class JsonParser(ObjectListParser):
    """Any model: the whole answer is `[{"name": ..., "arguments": {...}}]`, or one such object."""

    name = "json"
    openers = ()
    layout = Layout(
        open="[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]",
    )

    def _text(self) -> bool:
        if self._num_calls:
            return self._plain()
        rest = self._held.lstrip()
        if not rest and not self._ended:
            return False
        if rest.startswith(("[", "{")):
            self._gap = self._held[: len(self._held) - len(rest)]
            self._held = rest
            self._state = self._list_start
        else:
            self._state = self._plain
        return True

    def _after_failure(self) -> bool:
        self._state = self._plain
        return True
