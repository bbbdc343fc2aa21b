"""Values that a model wrote as plain text, read by the schema of their parameter."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from inference.tools.function import ToolFunction

#: Spellings of types that schemas made by hand use.
_ALIASES = {
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


def kinds_of(schema: Any, depth: int = _MAX_NESTING) -> tuple[str, ...]:
    """JSON types that a schema allows, in its order; () when it doesn't say within `depth`."""
    found: dict[str, None] = {}
    if not isinstance(schema, dict) or not depth:
        return ()
    named = schema.get("type")
    for kind in named if isinstance(named, list) else [named]:
        if isinstance(kind, str):
            found[_ALIASES.get(kind, kind)] = None
    for choice in ("anyOf", "oneOf", "allOf"):
        options = schema.get(choice)
        for option in options if isinstance(options, list) else []:
            found.update(dict.fromkeys(kinds_of(option, depth - 1)))
    if not found:
        values = schema.get("enum") if isinstance(schema.get("enum"), list) else []
        for value in [*(values or []), *([schema["const"]] if "const" in schema else [])]:
            found[_JSON_TYPES.get(type(value), "null" if value is None else "object")] = None
    return tuple(found)


def is_text(schema: Any) -> bool:
    """Whether a value is text whatever it looks like: its parameter is a string, or not known."""
    return schema is None or kinds_of(schema) == ("string",)


def as_json(text: str, schema: Any) -> str:
    """A value as JSON of a type that the schema allows; text that fits none stays text.

    Args:
        text: as the model wrote it. schema: the parameter's, None for one that isn't known.
    """
    kinds = kinds_of(schema)
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
    return loose_json(text)


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


def loose_json(text: str) -> str:
    """Text that is JSON, or a Python literal, as JSON; any other as a string."""
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return json.dumps(text, ensure_ascii=False)
