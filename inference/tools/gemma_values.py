"""Values as Gemma writes them: JSON with bare names, and a mark instead of quotation marks."""

from __future__ import annotations

import json
import re
from typing import Any

from inference.parsing.literals import may_begin

#: A value inside more others than this stays text.
MAX_DEPTH = 64


class ValueEnd:
    """Finds where a value ends: before the comma or brace that isn't inside of it.

    Args:
        mark: stands on both sides of a string.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._tokens = re.compile(rf"{re.escape(mark)}|[,{{}}\[\]]")
        self._in_string = False
        self._depth = 0

    def feed(self, text: str) -> tuple[int, bool]:
        """How many characters of this piece belong to the value, and whether it ends there.

        Fewer than all without an end: the last ones may begin a mark.
        """
        whole = len(text) - may_begin(text, (self._mark,))
        for found in self._tokens.finditer(text, 0, whole):
            if found[0] == self._mark:
                self._in_string = not self._in_string
            elif self._in_string:
                continue
            elif self._depth == 0 and found[0] in ",}]":
                return found.start(), True
            elif found[0] in "{[":
                self._depth += 1
            elif found[0] in "}]":
                self._depth -= 1
        return whole, False


def read_value(text: str, mark: str) -> Any:
    """The value of a whole text; what can't be read stays text."""
    reader = _Reader(text, mark)
    try:
        value = reader.value(MAX_DEPTH)
    except ValueError:
        return text
    return value if reader.at_end else text


class _Reader:
    """Reads a text from its start. Each method raises ValueError for what it can't read."""

    def __init__(self, text: str, mark: str) -> None:
        self._text, self._mark, self._place = text, mark, 0
        self._bare = re.compile(rf"(?:(?!{re.escape(mark)})[^,:{{}}\[\]])*")

    @property
    def at_end(self) -> bool:
        return not self._text[self._place :].strip()

    def value(self, depth: int) -> Any:
        """A string, object, list or bare word."""
        if not depth:
            raise ValueError("too deep")
        if self._take("{"):
            return self._members(depth)
        if self._take("["):
            return self._items(depth)
        return self._string() if self._take(self._mark) else _scalar(self._word(":"))

    def _take(self, token: str) -> bool:
        place = self._place
        while place < len(self._text) and self._text[place].isspace():
            place += 1
        if not self._text.startswith(token, place):
            return False
        self._place = place + len(token)
        return True

    def _string(self) -> str:
        end = self._text.find(self._mark, self._place)
        if end < 0:
            raise ValueError("a string without an end")
        value = self._text[self._place : end]
        self._place = end + len(self._mark)
        return value

    def _word(self, more: str = "") -> str:
        """A bare word; with `more` those characters belong to it too."""
        found = self._bare.match(self._text, self._place)
        start, self._place = self._place, found.end() if found else self._place
        while more and self._text.startswith(more, self._place):
            found = self._bare.match(self._text, self._place + len(more))
            self._place = found.end() if found else self._place + len(more)
        return self._text[start : self._place].strip()

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._take("}"):
            key = self._string() if self._take(self._mark) else self._word()
            if not key or not self._take(":"):
                raise ValueError("no member")
            members[key] = self.value(depth - 1)
            if not self._take(",") and not self._text.startswith("}", self._place):
                raise ValueError("no comma")
        return members

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take("]"):
            items.append(self.value(depth - 1))
            if not self._take(",") and not self._text.startswith("]", self._place):
                raise ValueError("no comma")
        return items


def _scalar(word: str) -> Any:
    """A bare word as JSON has it; any other is text."""
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    finite = not isinstance(value, float) or (value == value and abs(value) != float("inf"))
    return value if finite and isinstance(value, bool | int | float | None) else word
