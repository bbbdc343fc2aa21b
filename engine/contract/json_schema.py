"""JSON schemas for outputs: objects are closed and integers bounded. Torch-free.

A schema that doesn't mention `additionalProperties` allows any, and models then tend to generate
some. The author of a schema for an output wants only the properties that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from urllib.parse import unquote

#: Maximum integer in outputs: readers with 64 bits keep it, and it is exact as a float, with which
#: the grammar backend computes. Without it a model may write digits until its tokens are spent.
MAX_INTEGER = 2**63 - 1024
#: Every integer up to this is exact as a float.
_EXACT = 2**53
#: Formats of pydantic and OpenAPI that don't restrict a string or number.
ANNOTATION_FORMATS = frozenset(
    (
        *("path", "file-path", "directory-path", "password", "binary", "byte", "base64"),
        *("base64url", "json-string", "int32", "int64", "uint32", "uint64", "float", "double"),
    )
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_NAME_ANNOTATIONS = {"type", "title", "description"}
_ADDITIONAL = {"additionalProperties", "unevaluatedProperties"}
_UNIONS = ("anyOf", "oneOf")
_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}


class InexactNumber(ValueError):
    """A number in a schema that can't be enforced exactly."""


def enforced_schema(schema: Any) -> Any:
    """A copy of a schema in which everything that it leaves open is decided.

    Raises:
        InexactNumber: a bound, factor or constant beyond 2**53 that isn't exact as a float.
    """
    schema = deepcopy(schema)
    for node in _walk(schema):
        _rewrite_property_names(schema, node)
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
    nodes = list(_walk(schema))
    for node in nodes:
        _bound_numbers(node)
        if isinstance(node.get("format"), str) and node["format"] in ANNOTATION_FORMATS:
            del node["format"]
    _close_objects(schema, nodes)
    return schema


def resolve_reference(root: Any, reference: str) -> Any:
    """The target of a JSON pointer (`#/...`) in the root; None if there is none."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    target = root
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            target = target.get(name) if isinstance(target, dict) else None
    return target


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas within a schema that are objects; values and annotations aren't schemas."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key in _MAPS:
            stack.extend(node[key].values() if isinstance(node.get(key), dict) else ())
        for key in _LISTS:
            stack.extend(node[key] if isinstance(node.get(key), list) else ())
        stack.extend(node[key] for key in _SCHEMAS if isinstance(node.get(key), dict))


# -- Numbers.


def _bound_numbers(node: dict[str, Any]) -> None:
    """Bound an integer's size, and refuse numbers that the backend would round."""
    for key in ("const", "enum"):
        for constant in _integers(node.get(key)):
            if _is_inexact(constant):
                raise InexactNumber(_inexact(key, constant))
    for key, sign in _BOUNDS.items():
        value = node.get(key)
        if isinstance(value, int) and value * sign >= MAX_INTEGER:
            del node[key]
        elif isinstance(value, int) and _is_inexact(value):
            raise InexactNumber(_inexact(key, value))
    factor = node.get("multipleOf")
    if isinstance(factor, int) and factor > _EXACT:
        raise InexactNumber(_inexact("multipleOf", factor))
    named = node.get("type")
    types = named if isinstance(named, list) else [named]
    if "integer" in types and "number" not in types and not {"enum", "const"} & node.keys():
        if not {"maximum", "exclusiveMaximum"} & node.keys():
            node["maximum"] = MAX_INTEGER
        if not {"minimum", "exclusiveMinimum"} & node.keys():
            node["minimum"] = -MAX_INTEGER


def _integers(value: Any) -> Iterator[int]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            stack.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, int) and not isinstance(item, bool):
            yield item


def _is_inexact(value: int) -> bool:
    return abs(value) > _EXACT and (abs(value) > MAX_INTEGER or int(float(value)) != value)


def _inexact(key: str, value: int) -> str:
    number = str(value) if abs(value) < 10**40 else "a number of more than 40 digits"
    return f"{key} {number} is beyond 2**53 and can't be enforced exactly"


# -- Objects.


def _rewrite_property_names(root: Any, node: dict[str, Any]) -> None:
    """Replace `propertyNames`, which the backend doesn't support, by the properties it allows, in
    place.

    Schemas of zod's records and pydantic's mappings use it. Other uses are left for the backend to
    refuse.
    """
    rule = node.get("propertyNames")
    if isinstance(rule, dict) and isinstance(rule.get("$ref"), str):
        rule = resolve_reference(root, rule["$ref"])
    if rule is not True and not (isinstance(rule, dict) and rule.get("type", "string") == "string"):
        return
    restrictions = {} if rule is True else {k: rule[k] for k in rule.keys() - _NAME_ANNOTATIONS}
    value = node.get("additionalProperties", {})
    if not restrictions:
        pass
    elif value is False or {"properties", "patternProperties"} & node.keys():
        return
    elif restrictions.keys() == {"enum"} and isinstance(restrictions["enum"], list):
        names = [name for name in restrictions["enum"] if isinstance(name, str)]
        node |= {"properties": dict.fromkeys(names, value), "additionalProperties": False}
    elif restrictions.keys() == {"pattern"}:
        node["patternProperties"] = {restrictions["pattern"]: value}
        node["additionalProperties"] = False
    else:
        return
    del node["propertyNames"]


def _close_objects(root: Any, nodes: list[dict[str, Any]]) -> None:
    """Allow only named properties if a schema doesn't say which others are allowed, in place.

    Schemas that apply together (`allOf`, a `$ref` or a union next to other keywords) allow what
    each of them names. So the schema that joins them is closed, and never its parts.
    """
    parts_of = {id(node): _parts(root, node) for node in nodes}
    parts: set[int] = set()
    waiting = [part for node in nodes if _joins(node) for part in parts_of[id(node)]]
    while waiting:
        part = waiting.pop()
        if id(part) not in parts:
            parts.add(id(part))
            waiting += [*parts_of.get(id(part), ()), *_options(part)]
    for node in nodes:
        refers = any(id(part) in parts for part in parts_of[id(node)])
        joins = _joins(node) or refers or {"properties", "patternProperties"} & node.keys()
        if joins and id(node) not in parts:
            if _is_closed_by_names(node, parts_of[id(node)]):
                del node["unevaluatedProperties"]
            _close(node, parts_of)


def _is_closed_by_names(node: dict[str, Any], parts: list[Any]) -> bool:
    """Whether `unevaluatedProperties: false` is equivalent to closing the schema: no property is
    allowed only by some alternative.
    """
    choosing = {"allOf", "$ref", *_UNIONS}
    return (
        node.get("unevaluatedProperties") is False
        and not _min_properties(node)
        and not node.keys() & set(_UNIONS)
        and all(isinstance(part, dict) and not part.keys() & choosing for part in parts)
    )


def _joins(node: dict[str, Any]) -> bool:
    """Whether several schemas apply together: more than one of these keywords, or `allOf`."""
    has_properties = bool({"properties", "patternProperties"} & node.keys())
    num_references = sum(key in node for key in ("$ref", *_UNIONS))
    return isinstance(node.get("allOf"), list) or has_properties + num_references > 1


def _parts(root: Any, node: dict[str, Any]) -> list[Any]:
    """Schemas that apply together with this one; None for a reference without a target here."""
    parts = [*node["allOf"]] if isinstance(node.get("allOf"), list) else []
    if isinstance(node.get("$ref"), str):
        parts.append(resolve_reference(root, node["$ref"]))
    if _joins(node):
        parts += _options(node)
    return [part for part in parts if not isinstance(part, bool)]


def _options(node: Any) -> list[Any]:
    lists = [node.get(key) for key in _UNIONS] if isinstance(node, dict) else []
    options = [option for options in lists if isinstance(options, list) for option in options]
    return [option for option in options if not isinstance(option, bool)]


def _close(node: dict[str, Any], parts_of: dict[int, list[Any]]) -> None:
    """Allow only what a schema and its parts name, unless one of them allows other properties."""
    names: dict[str, bool] = {}
    patterns: dict[str, bool] = {}
    seen: set[int] = set()
    waiting: list[Any] = [node]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if id(part) not in parts_of or _ADDITIONAL & part.keys():
            return
        waiting += [*parts_of[id(part)], *(_options(part) if part is not node else ())]
        for key, target in (
            ("properties", names),
            ("required", names),
            ("patternProperties", patterns),
        ):
            value = part.get(key)
            listed = value if isinstance(value, dict | list) else ()
            target |= {name: True for name in listed if isinstance(name, str)}
    if not patterns and _min_properties(node) > len(names):
        return  # it requires more than it names
    properties, by_pattern = node.get("properties", {}), node.get("patternProperties", {})
    if not isinstance(properties, dict) or not isinstance(by_pattern, dict):
        return  # the grammar's compiler reports the error
    if not (names or patterns or "properties" in node):
        return
    unlisted = {name: True for name in names if name not in properties}
    node["properties"] = properties | unlisted
    if patterns:
        node["patternProperties"] = {**patterns, **by_pattern}
    node["additionalProperties"] = False


def _min_properties(node: dict[str, Any]) -> int:
    value = node.get("minProperties")
    return value if isinstance(value, int) else 0
