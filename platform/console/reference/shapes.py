"""A JSON schema in words: a row a field, a link to each named shape."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

PREFIX = "#/components/schemas/"
#: Bounds that a reader wants to know, and how they're said.
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "over {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "maxLength": "at most {} characters",
    "maxItems": "entries: at most {}",
    "minItems": "entries: at least {}",
    "pattern": "like {}",
}
MOST_VALUES = 12


@dataclass(frozen=True)
class Word:
    """A part of a type: text, or a shape's name that leads there."""

    text: str
    shape: str = ""


@dataclass(frozen=True)
class Row:
    """A field. `kind`: its type. `bounds`: the rest that the schema says of it."""

    name: str
    kind: list[Word]
    required: bool = False
    text: str = ""
    bounds: list[str] = field(default_factory=list)


def rows_of(schema: dict[str, Any]) -> list[Row]:
    """The fields of an object."""
    required = set(schema.get("required", ()))
    return [
        Row(name, kind_of(each), name in required, each.get("description", ""), bounds_of(each))
        for name, each in schema.get("properties", {}).items()
    ]


def kind_of(schema: dict[str, Any]) -> list[Word]:
    """The type in words. "or null" is left out where something else may stand there."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(PREFIX)
        return [Word(name, name)]
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options:
        told = [each for each in options if each.get("type") != "null"]
        found: list[Word] = []
        for each in told:
            found += [Word(" or "), *kind_of(each)] if found else kind_of(each)
        return found or [Word("null")]
    if "const" in schema:
        return [Word(repr(schema["const"]))]
    if values := schema.get("enum"):
        shown = [str(each) for each in values[:MOST_VALUES]]
        more = ["…"] if len(values) > MOST_VALUES else []
        return [Word(" | ".join([*shown, *more]))]
    kind = schema.get("type", "anything")
    if kind == "array":
        return [Word("list of "), *kind_of(schema.get("items") or {})]
    if isinstance(kind, list):
        return [Word(" or ".join(each for each in kind if each != "null"))]
    if schema.get("format") == "binary":
        return [Word("a file")]
    return [Word({"object": "object", "integer": "whole number"}.get(kind, kind))]


def bounds_of(schema: dict[str, Any]) -> list[str]:
    """What else it must be, and what it is when it's left out."""
    found = []
    for each in (schema, *schema.get("anyOf", ())):
        found += [said.format(each[name]) for name, said in BOUNDS.items() if name in each]
    default = schema.get("default")
    if default not in (None, "", [], {}):
        found.append(f"default {json.dumps(default)}")
    return found
