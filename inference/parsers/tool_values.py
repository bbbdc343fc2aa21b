"""Values in calls: parsing of Gemma's and Python's syntax, and conversion to JSON by a schema."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from inference.parsers.parameter_schemas import ParameterSchema, type_of
from inference.parsers.state_machine import partial_suffix_length
from inference.parsers.tool_grammar import quoted

#: Maximum nesting of a value; deeper ones stay text.
MAX_DEPTH = 64


class ValueEnd:
    """Finds where a value ends: before a comma or closing brace outside of it.

    Args:
        mark: text on both sides of a string.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._tokens = re.compile(rf"{re.escape(mark)}|[,{{}}\[\]]")
        self._in_string = False
        self._depth = 0

    def feed(self, text: str) -> tuple[int, bool]:
        """Return how many characters of this chunk belong to the value, and whether it ends there.

        If it doesn't end, the remaining characters may begin a mark.
        """
        end = len(text) - partial_suffix_length(text, (self._mark,))
        for match in self._tokens.finditer(text, 0, end):
            if match[0] == self._mark:
                self._in_string = not self._in_string
            elif self._in_string:
                continue
            elif self._depth == 0 and match[0] in ",}]":
                return match.start(), True
            elif match[0] in "{[":
                self._depth += 1
            elif match[0] in "}]":
                self._depth -= 1
        return end, False


def read_value(text: str, mark: str) -> Any:
    """Return a text's value, which may be JSON; invalid values stay text."""
    value = _json_or_python(text) if mark not in text else None
    if isinstance(value, dict | list):
        return value
    reader = _Reader(text, mark)
    try:
        value = reader.value(MAX_DEPTH)
    except ValueError:
        return text
    return value if reader.at_end else text


class _Reader:
    """Recursive-descent parser. Its methods raise ValueError for invalid text."""

    def __init__(self, text: str, mark: str) -> None:
        self._text, self._mark, self._position = text, mark, 0
        self._bare = re.compile(rf"(?:(?!{re.escape(mark)})[^,:{{}}\[\]])*")

    @property
    def at_end(self) -> bool:
        return not self._text[self._position :].strip()

    def value(self, depth: int) -> Any:
        """Parse a string, object, list or bare word."""
        if not depth:
            raise ValueError("too deep")
        if self._accept("{"):
            return self._members(depth)
        if self._accept("["):
            return self._items(depth)
        return self._string() if self._accept(self._mark) else _scalar(self._word(":"))

    def _accept(self, token: str) -> bool:
        position = self._position
        while position < len(self._text) and self._text[position].isspace():
            position += 1
        if not self._text.startswith(token, position):
            return False
        self._position = position + len(token)
        return True

    def _string(self) -> str:
        end = self._text.find(self._mark, self._position)
        if end < 0:
            raise ValueError("a string without an end")
        value = self._text[self._position : end]
        self._position = end + len(self._mark)
        return value

    def _word(self, more: str = "") -> str:
        """Parse a bare word; `more`: further characters that it may contain."""
        match = self._bare.match(self._text, self._position)
        start, self._position = self._position, match.end() if match else self._position
        while more and self._text.startswith(more, self._position):
            match = self._bare.match(self._text, self._position + len(more))
            self._position = match.end() if match else self._position + len(more)
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
    """Return the JSON value of a bare word; other words are text."""
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    finite = not isinstance(value, float) or (value == value and abs(value) != float("inf"))
    return value if finite and isinstance(value, bool | int | float | None) else word


# -- Python values in calls: finding their end, and conversion to JSON.


#: Characters after a quotation mark that decide whether it ends the string.
LOOKAHEAD_CHARS = 160
_ESCAPE = re.compile(r"\\(['\"\\ntrbf])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_INTEGER = re.compile(r"-?[0-9]+")
_LEADING_ZEROS = re.compile(r"(-?)0+([0-9]{1,300})")
_JSON_NAMES = {"true": True, "false": False, "null": None, "none": None}
#: Maximum nesting of a value; deeper ones stay text.
_MAX_DEPTH = 64


class LiteralScanner:
    """Finds where a Python value ends: before a comma or closing parenthesis outside of it.

    Models forget to escape quotation marks inside strings. So a mark ends a string that is a whole
    argument only if another argument or the call's end follows.

    Args:
        follows: matches the text after an argument.
    """

    def __init__(self, follows: re.Pattern[str]) -> None:
        self._follows = follows
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str, *, is_final: bool) -> tuple[int, bool]:
        """Return how many characters of this chunk belong to the value, and whether it ends there.

        If it doesn't end, more text is needed to decide.
        """
        for index, char in enumerate(text):
            if self._quote:
                if char == self._quote and not self._escaped and self._depth == 0:
                    ends = self._ends_string(
                        text[index + 1 : index + 1 + LOOKAHEAD_CHARS], is_final
                    )
                    if ends is None:
                        return index, False
                    if not ends:
                        continue
                self._in_string(char)
            elif char in "\"'":
                self._quote = char
            elif self._depth == 0 and char in ",)":
                return index, True
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
        return len(text), False

    def _ends_string(self, rest: str, is_final: bool) -> bool | None:
        if self._follows.match(rest):
            return True
        if is_final:
            return not rest.strip(" \t\r\n,)]")
        return False if len(rest) >= LOOKAHEAD_CHARS else None

    def _in_string(self, char: str) -> None:
        if not self._escaped and char == self._quote:
            self._quote = ""
        self._escaped = char == "\\" and not self._escaped


def python_as_json(text: str) -> str:
    """Convert a Python value to JSON; invalid values stay text."""
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
        text = _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text[1:-1])
    return json.dumps(text, ensure_ascii=False)


def _value(node: ast.expr, depth: int = _MAX_DEPTH) -> Any:
    """Return a literal's value. Raises ValueError for anything else."""
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


# -- Converting values that a model wrote to JSON of a type that their schema allows.


_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def coerce_to_schema(text: str, parameter: ParameterSchema | None, *, is_json: bool = False) -> str:
    """Convert a value to JSON of a type that the schema allows; text that fits none stays text.

    If the schema allows only strings, the value is plain text. Other values are JSON; Python's
    constants, lists and objects are accepted as well.

    Args:
        text: the value as the model wrote it. parameter: its schema, None if unknown. is_json:
            whether the model marked the value as JSON.
    """
    if parameter is None and is_json:
        parameter = ParameterSchema({})
    if parameter is None or parameter.is_text:
        value = _json_or_python(text.strip()) if is_json else None
        text = value if isinstance(value, str) else text
        is_null = parameter is not None and "null" in parameter.types
        return "null" if is_null and text.strip().lower() == "null" else quoted(text)
    bare, types = text.strip(), parameter.types
    if _NUMBER.fullmatch(bare):
        return _number(bare, types) or quoted(text)
    if bare.lower() in _JSON_NAMES:
        constant = _JSON_NAMES[bare.lower()]
        fits = type_of(constant) in types or "string" not in types
        return json.dumps(constant) if fits else quoted(text)
    value = _json_or_python(bare)
    if isinstance(value, str):
        # The schema allows no string, so the string's content is the value: `"5"`.
        return quoted(value) if "string" in types else coerce_to_schema(value, parameter)
    if value is None or ("string" in types and type_of(value) not in types):
        return quoted(text)
    return json.dumps(value, ensure_ascii=False)


def _number(text: str, types: frozenset[str]) -> str | None:
    """Return a number in its original spelling, or as an integer; None if it is too large."""
    if types.isdisjoint(("integer", "number")) and "string" in types:
        return None
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return None
    if "number" not in types and value.is_integer() and _INTEGER.fullmatch(text) is None:
        return str(int(value))
    return text


def _json_or_python(text: str) -> Any:
    """Return the string, list or object in a text; None for other values."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        if text[:1] not in ("[", "{", "("):
            return None
        try:
            value = _value(ast.parse(text, mode="eval").body)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return None
    return value if isinstance(value, str | list | dict) else None


def literal_as_json(text: str, parameter: ParameterSchema | None) -> str:
    """Convert a Python value to JSON, coerced if the schema doesn't allow its type."""
    read = _json_or_python(text.strip())
    value = python_as_json(text) if read is None else json.dumps(read, ensure_ascii=False)
    if parameter is None or type_of(json.loads(value)) in parameter.types:
        return value
    inner = json.loads(value)
    return coerce_to_schema(inner if isinstance(inner, str) else text.strip(), parameter)
