"""Values as Gemma writes them: JSON with bare names, and a mark instead of quotation marks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from inference.parsers.state_machine import partial_suffix_length
from inference.parsers.tool_grammar import ToolFunction

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
        whole = len(text) - partial_suffix_length(text, (self._mark,))
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
        self._text, self._mark, self._position = text, mark, 0
        self._bare = re.compile(rf"(?:(?!{re.escape(mark)})[^,:{{}}\[\]])*")

    @property
    def at_end(self) -> bool:
        return not self._text[self._position :].strip()

    def value(self, depth: int) -> Any:
        """A string, object, list or bare word."""
        if not depth:
            raise ValueError("too deep")
        if self._accept("{"):
            return self._members(depth)
        if self._accept("["):
            return self._items(depth)
        return self._string() if self._accept(self._mark) else _scalar(self._word(":"))

    def _accept(self, token: str) -> bool:
        place = self._position
        while place < len(self._text) and self._text[place].isspace():
            place += 1
        if not self._text.startswith(token, place):
            return False
        self._position = place + len(token)
        return True

    def _string(self) -> str:
        end = self._text.find(self._mark, self._position)
        if end < 0:
            raise ValueError("a string without an end")
        value = self._text[self._position : end]
        self._position = end + len(self._mark)
        return value

    def _word(self, more: str = "") -> str:
        """A bare word; with `more` those characters belong to it too."""
        found = self._bare.match(self._text, self._position)
        start, self._position = self._position, found.end() if found else self._position
        while more and self._text.startswith(more, self._position):
            found = self._bare.match(self._text, self._position + len(more))
            self._position = found.end() if found else self._position + len(more)
        return self._text[start : self._position].strip()

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._accept("}"):
            key = self._string() if self._accept(self._mark) else self._word()
            if not key or not self._accept(":"):
                raise ValueError("no member")
            members[key] = self.value(depth - 1)
            if not self._accept(",") and not self._text.startswith("}", self._position):
                raise ValueError("no comma")
        return members

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._accept("]"):
            items.append(self.value(depth - 1))
            if not self._accept(",") and not self._text.startswith("]", self._position):
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


# -- Python values in calls: where they end, and what they are as JSON.


#: Characters after a quotation mark that tell whether it ends the string.
LOOKAHEAD_CHARS = 160
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
                    ends = self._ends_string(text[place + 1 : place + 1 + LOOKAHEAD_CHARS], ended)
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
        return False if len(rest) >= LOOKAHEAD_CHARS else None

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


# -- Values that a model wrote as plain text, read by the schema of their parameter.


#: Spellings of types that schemas made by hand use.
TYPE_ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
#: References followed before a schema counts as one that says nothing.
_MAX_REFERENCES = 16
#: Alternatives inside each other that are looked at.
_MAX_NESTING = 4
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def property_schema(function: ToolFunction | None, key: str) -> Any:
    """The schema of a parameter, its reference resolved; None for a parameter that isn't known."""
    if function is None:
        return None
    schema = (function.parameters.get("properties") or {}).get(key)
    for _ in range(_MAX_REFERENCES):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            return schema
        schema = _resolved(function.parameters, schema["$ref"])
    return {}


def _resolved(parameters: Mapping[str, Any], reference: str) -> Any:
    found: Any = parameters
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return {} if found is None else found


def json_types(schema: Any, depth: int = _MAX_NESTING) -> tuple[str, ...]:
    """JSON types that a schema allows, in its order; () when it doesn't say within `depth`."""
    found: dict[str, None] = {}
    if not isinstance(schema, dict) or not depth:
        return ()
    named = schema.get("type")
    for kind in named if isinstance(named, list) else [named]:
        if isinstance(kind, str):
            found[TYPE_ALIASES.get(kind, kind)] = None
    for choice in ("anyOf", "oneOf", "allOf"):
        options = schema.get(choice)
        for option in options if isinstance(options, list) else []:
            found.update(dict.fromkeys(json_types(option, depth - 1)))
    if not found:
        values = schema.get("enum") if isinstance(schema.get("enum"), list) else []
        for value in [*(values or []), *([schema["const"]] if "const" in schema else [])]:
            found[_JSON_TYPES.get(type(value), "null" if value is None else "object")] = None
    return tuple(found)


def is_text(schema: Any) -> bool:
    """Whether a value is text whatever it looks like: its parameter is a string, or not known."""
    return schema is None or json_types(schema) == ("string",)


def coerce_to_schema(text: str, schema: Any) -> str:
    """A value as JSON of a type that the schema allows; text that fits none stays text.

    Args:
        text: as the model wrote it. schema: the parameter's, None for one that isn't known.
    """
    kinds = json_types(schema)
    bare = text.strip()
    if "null" in kinds and bare.lower() == "null":
        return "null"
    if schema is None or "string" in kinds:
        return json.dumps(text, ensure_ascii=False)
    if "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower()
    if {"integer", "number"} & set(kinds):
        number = _number(bare)
        if number is not None:
            return number
    return parse_lenient_json(text)


def _number(text: str) -> str | None:
    """A finite number, whole ones without a fraction."""
    try:
        return json.dumps(int(text))
    except ValueError:
        pass
    try:
        value = float(text)
        return json.dumps(int(value) if value.is_integer() else value, allow_nan=False)
    except (ValueError, OverflowError):
        return None


def parse_lenient_json(text: str) -> str:
    """Text that is JSON, or a Python literal, as JSON; any other as a string."""
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return json.dumps(text, ensure_ascii=False)
