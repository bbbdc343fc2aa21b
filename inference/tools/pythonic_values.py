"""Python values in calls: where they end, and what they are as JSON."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

#: Characters after a quotation mark that tell whether it ends the string.
LOOK_AHEAD = 160
_ESCAPE = re.compile(r"\\(['\"\\ntrbf])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_LEADING_ZEROS = re.compile(r"(-?)0+([0-9]+)")
_JSON_NAMES = {"true": True, "false": False, "null": None, "none": None}
#: A value inside more others than this stays text.
_MAX_DEPTH = 64


class LiteralScanner:
    """Finds where a Python value ends: before the comma or parenthesis that isn't inside of it.

    Models forget to escape quotation marks inside a string. So a mark ends a string that is an
    argument by itself only where another argument or the call's end follows.

    Args:
        follows: matches what may stand after an argument.
    """

    def __init__(self, follows: re.Pattern[str]) -> None:
        self._follows = follows
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str, *, ended: bool) -> tuple[int, bool]:
        """How many characters of this piece belong to the value, and whether it ends there.

        Fewer than all without an end: more text is needed to tell.
        """
        for place, char in enumerate(text):
            if self._quote:
                if char == self._quote and not self._escaped and self._depth == 0:
                    ends = self._ends_string(text[place + 1 : place + 1 + LOOK_AHEAD], ended)
                    if ends is None:
                        return place, False
                    if not ends:
                        continue
                self._in_string(char)
            elif char in "\"'":
                self._quote = char
            elif self._depth == 0 and char in ",)":
                return place, True
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
        return len(text), False

    def _ends_string(self, rest: str, ended: bool) -> bool | None:
        if self._follows.match(rest):
            return True
        if ended:
            return not rest.strip(" \t\r\n,)]")
        return False if len(rest) >= LOOK_AHEAD else None

    def _in_string(self, char: str) -> None:
        if not self._escaped and char == self._quote:
            self._quote = ""
        self._escaped = char == "\\" and not self._escaped


def python_as_json(text: str) -> str:
    """A Python value as JSON; what can't be read stays text."""
    text = text.strip()
    try:
        value = _value(ast.parse(text, mode="eval").body)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    padded = _LEADING_ZEROS.fullmatch(text)
    if padded is not None:
        return padded[1] + (padded[2].lstrip("0") or "0")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text[1:-1])
    return json.dumps(text, ensure_ascii=False)


def _value(node: ast.expr, depth: int = _MAX_DEPTH) -> Any:
    """The value of a literal. Raises ValueError for what is none."""
    if not depth:
        raise ValueError("too deep")
    if isinstance(node, ast.Dict):
        return {
            _key(key, depth): _value(value, depth - 1)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(item, depth - 1) for item in node.elts]
    if isinstance(node, ast.Name) and node.id.lower() in _JSON_NAMES:
        return _JSON_NAMES[node.id.lower()]
    return ast.literal_eval(node)


def _key(node: ast.expr | None, depth: int) -> str:
    if node is None:  # of `**other`
        raise ValueError("no literal")
    key = _value(node, depth - 1)
    return key if isinstance(key, str) else json.dumps(key)
