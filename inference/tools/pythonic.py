"""Llama 3.2's and 4's other way: a Python list of calls, `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, ClassVar

from inference.tools.base import ToolFunction, ToolParser
from inference.tools.layout import Layout, checked_key

_FIRST = re.compile(r"\s*\[\s*(?P<name>[A-Za-z_][\w.-]{0,127})\(")
_NEXT = re.compile(r"\s*(?:,\s*(?P<name>[A-Za-z_][\w.-]{0,127})\(|(?P<end>\]))")
_KEY = re.compile(r"[\s,]*(?:(?P<key>[A-Za-z_]\w{0,127})\s*=\s*|(?P<end>\)))")
_NAME = re.compile(r"[A-Za-z_]\w{0,127}")
_VALUE_RULES = (
    r'PY_STRING: /"([^"\\\n\x00-\x1f]|\\["\\nt])*"/',
    r"PY_INTEGER: /-?(0|[1-9][0-9]{0,17})/",
    r"PY_NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    'py_boolean: "True" | "False"',
    'py_list: "[" (py_value (", " py_value)*)? "]"',
    'py_dict: "{" (py_item (", " py_item)*)? "}"',
    'py_item: PY_STRING ": " py_value',
    'py_value: PY_STRING | PY_NUMBER | py_boolean | "None" | py_list | py_dict',
)
_RULE_OF_TYPE = {
    "string": "PY_STRING",
    "integer": "PY_INTEGER",
    "number": "PY_NUMBER",
    "boolean": "py_boolean",
    "array": "py_list",
    "object": "py_dict",
}


def _keywords(rule: str, function: ToolFunction) -> list[str]:
    """`a=1, b="x"`: required parameters first, each of its type; others may follow."""
    properties = function.parameters.get("properties") or {}
    required = [key for key in properties if key in (function.parameters.get("required") or [])]
    others = [key for key in properties if key not in required]
    parts = [f"{_opening(key)} {_value_rule(properties[key])}" for key in required]
    more = [f"{_opening(key)} {_value_rule(properties[key])}" for key in others]
    if not parts:  # the first one has no comma before it
        tails = [f"{part}{_rest(more[place + 1 :])}" for place, part in enumerate(more)]
        return [f"{rule}: {' | '.join([*tails, json.dumps('')])}"]
    comma = ' ", " '
    return [f"{rule}: {comma.join(parts)}{_rest(more)}"]


def _opening(key: str) -> str:
    return json.dumps(f"{checked_key(key, _NAME)}=", ensure_ascii=False)


def _rest(parts: list[str]) -> str:
    return "".join(f' (", " {part})?' for part in parts)


def _value_rule(schema: Any) -> str:
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return (
            "("
            + " | ".join(json.dumps(repr_of(item), ensure_ascii=False) for item in schema["enum"])
            + ")"
        )
    kind = schema.get("type") if isinstance(schema, dict) else None
    return _RULE_OF_TYPE.get(kind, "py_value") if isinstance(kind, str) else "py_value"


def repr_of(value: Any) -> str:
    """A JSON value as Python writes it, strings in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


class PythonicParser(ToolParser):
    """The whole answer is the list. Arguments come one by one."""

    name = "pythonic"
    template_marks: ClassVar[tuple[str, ...]] = ("[func_name1(",)
    layout = Layout(
        open="[",
        begin="NAME(",
        end=")",
        separator=", ",
        close="]",
        arguments=_keywords,
        shared=_VALUE_RULES,
    )

    _num_values = 0
    _literal: LiteralScanner
    _read = ""

    def _text(self) -> bool:
        rest = self._held.lstrip()
        if not rest and not self._ended:
            return False
        header = self._header(_FIRST) if rest.startswith("[") else False
        if header is None:
            return False
        if header is False:
            self._state = self._plain
            return True
        self._begin(header["name"])
        return True

    def _begin(self, name: str) -> None:
        self._call(name)
        self._num_values = 0
        self._state = self._keyword

    def _keyword(self) -> bool:
        header = self._header(_KEY)
        if header is None:
            return False
        if header is False:
            self._state = self._plain
            return True
        if header["end"]:
            self._arguments("}" if self._num_values else "{}")
            self._state = self._between
            return True
        self._arguments(f"{', ' if self._num_values else '{'}{json.dumps(header['key'])}: ")
        self._num_values += 1
        self._literal, self._read = LiteralScanner(), ""
        self._state = self._value
        return True

    def _value(self) -> bool:
        end = self._literal.feed(self._held)
        self._read += self._held[:end]
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self._arguments(_as_json(self._read))
        self._state = self._keyword
        return True

    def _between(self) -> bool:
        header = self._header(_NEXT)
        if header is None:
            return False
        if header is False or header["end"]:
            self._state = self._plain
        else:
            self._begin(header["name"])
        return True


class LiteralScanner:
    """Finds where a Python value ends: before the comma or parenthesis that isn't inside of it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """The place of the end in this piece; None while the value goes on."""
        for place, char in enumerate(text):
            if self._quote:
                self._in_string(char)
            elif char in "\"'":
                self._quote = char
            elif self._depth == 0 and char in ",)":
                return place
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
        return None

    def _in_string(self, char: str) -> None:
        if not self._escaped and char == self._quote:
            self._quote = ""
        self._escaped = char == "\\" and not self._escaped


def _as_json(text: str) -> str:
    """A Python value as JSON; what can't be read stays text."""
    try:
        value = ast.literal_eval(text.strip())
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text.strip(), ensure_ascii=False)
