"""Schemas in the spirit of the JSON-Schema-Test-Suite, for the keywords that the backend claims."""

from __future__ import annotations

from typing import Any


def obj(required: bool = True, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**schema, "required": list(properties)} if required else schema


SHORT = {"type": "string", "maxLength": 4}
SMALL = {"type": "integer", "minimum": -9, "maximum": 99}
SCHEMAS: dict[str, dict[str, Any]] = {
    "type string": SHORT,
    "type boolean": {"type": "boolean"},
    "type null": {"type": "null"},
    "type list": {"type": ["boolean", "null"]},
    "integer bounds": SMALL,
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "number bounds": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multipleOf": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "const": {"const": {"a": [1, "b", None]}},
    "enum": {"enum": ["red", 5, None, {"x": 1}]},
    "enum of a type": {"type": "string", "enum": ["on", "off"]},
    "minLength": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]+x$", "maxLength": 8},
    "unanchored pattern": {"type": "string", "pattern": "b[0-9]", "maxLength": 6},
    "format date": {"type": "string", "format": "date"},
    "format time": {"type": "string", "format": "time"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "items": {"type": "array", "items": SMALL, "maxItems": 3},
    "minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [SHORT, SMALL],
        "items": False,
        "minItems": 2,
    },
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": SMALL, "maxItems": 2},
        "maxItems": 2,
    },
    "required": obj(a=SHORT, b=SMALL),
    "optional": obj(False, a=SHORT, b=SMALL),
    "additionalProperties schema": {
        "type": "object",
        "properties": {"a": SMALL},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "nested objects": obj(a=obj(b=obj(c=SHORT)), d={"type": "boolean"}),
    "escaped names": obj(**{'a"b': SMALL, "c\\d": SMALL, "é\n": SMALL}),
    "anyOf": {"anyOf": [{"type": "null"}, SMALL, obj(a=SMALL)]},
    "oneOf disjoint": {"oneOf": [{"type": "boolean"}, SHORT]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "allOf objects": {
        "allOf": [
            {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
            {"properties": {"b": SHORT}, "required": ["b"], "maxProperties": 2},
        ],
    },
    "$ref": {"$defs": {"n": SMALL}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    "$ref to a $ref": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": obj(x=SMALL)},
        "$ref": "#/$defs/a",
    },
    "definitions": {"definitions": {"s": SHORT}, **obj(v={"$ref": "#/definitions/s"})},
    "recursive": {
        "$defs": {"t": obj(v=SMALL, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]})},
        "$ref": "#/$defs/t",
    },
    "annotations": {"title": "T", "description": "D", "default": 1, "examples": [2], **SMALL},
    "false": {"type": "array", "items": False},
    "deep mix": obj(
        name={"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"},
        tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        at={"anyOf": [obj(x=SMALL, y=SMALL), {"type": "null"}]},
    ),
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "propertyless": {"type": "object", "additionalProperties": False},
}
#: Keywords that the backend doesn't know: refused, never ignored.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 1}, "type": "string"},
    "uniqueItems": {"type": "array", "items": SMALL, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 1}},
    "remote $ref": {"$ref": "https://example.com/schema.json"},
    "overlapping oneOf": {"oneOf": [SMALL, {"type": "integer", "minimum": 5}]},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unknown format": {"type": "string", "format": "colour"},
}
