"""Looks parameters up in a function's JSON schema, through references and unions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from engine.contract.json_schema import resolve_reference

#: Non-standard type names in handwritten schemas -> JSON Schema types.
TYPE_ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
#: All JSON types; "number" always appears together with "integer".
ALL_TYPES = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))
#: Maximum nesting of references and alternatives that are followed.
_MAX_NESTING = 32
#: Maximum number of forms of a function's arguments in a grammar; more are merged into one.
_MAX_FORMS = 16
_UNIONS = ("anyOf", "oneOf")

#: An object's properties, and the names of the required ones.
ObjectForm = tuple[dict[str, Any], list[str]]


class ParameterSchema:
    """The schema of a function's arguments, of one argument, or of a nested value.

    It resolves `$ref`, `allOf`, `anyOf` and `oneOf`. Each schema is visited once, since schemas
    may be recursive.

    Args:
        root: the function's schema, which references are resolved against.
        schema: the schema itself; by default the root.
    """

    def __init__(self, root: Mapping[str, Any], schema: Any = None) -> None:
        self.schema = root if schema is None else schema
        self._root, self._nesting = root, 0
        self._nodes: dict[int, ParameterSchema] = {id(self.schema): self}
        self._answers: dict[Any, Any] = {}

    @property
    def types(self) -> frozenset[str]:
        """JSON types of the allowed values; all types if the schema has no restriction."""
        return self._answer("types", ALL_TYPES, self._find_types)

    @property
    def is_text(self) -> bool:
        """Whether values are written as plain text: strings (or null, written `null`)."""
        return "string" in self.types and self.types <= {"string", "null"}

    @property
    def choices(self) -> list[Any] | None:
        """The allowed values, if the schema lists them."""
        return self._answer("choices", None, self._find_choices)

    @property
    def options(self) -> list[ParameterSchema]:
        """The schemas that stand for this one: alternatives, or a reference's target."""
        return self._answer("options", [], self._find_options)

    def keyword(self, name: str) -> Any:
        """Return a keyword's value, from this schema or the only nested one that may have it."""
        return self._answer(("keyword", name), None, lambda: self._find_keyword(name))

    @property
    def forms(self) -> list[ObjectForm]:
        """Alternative forms of an object; never empty."""
        return self._answer("forms", [({}, [])], self._find_forms)

    def property(self, key: str) -> ParameterSchema | None:
        """Return the schema of an object's property; None for an unknown property."""
        return self._answer(("property", key), None, lambda: self._find_property(key))

    def nested(self, schema: Any) -> ParameterSchema:
        """Return a schema nested in this one."""
        schema = {} if schema is None else schema
        node = self._nodes.get(id(schema))
        if node is None:
            node = self._nodes[id(schema)] = ParameterSchema(self._root, schema)
            node._nodes, node._nesting = self._nodes, self._nesting + 1
        return node

    def standalone(self) -> dict[str, Any]:
        """Return the schema together with the targets of its references."""
        if not isinstance(self.schema, dict):
            return {}
        schema = _moved(self.schema)
        return (
            schema if schema == self.schema else {**schema, "$defs": {"root": _moved(self._root)}}
        )

    def _answer(self, question: Any, default: Any, find: Callable[[], Any]) -> Any:
        """Return `find()`, cached; the default during recursion and for schemas without content."""
        if question not in self._answers:
            self._answers[question] = default
            if isinstance(self.schema, dict) and self._nesting < _MAX_NESTING:
                self._answers[question] = find()
        return self._answers[question]

    def _conjuncts(self) -> list[ParameterSchema]:
        """Schemas that values must satisfy too: `allOf` and the target of `$ref`."""
        parts = list(_list_of(self.schema.get("allOf")))
        if isinstance(self.schema.get("$ref"), str):
            parts.append(resolve_reference(self._root, self.schema["$ref"]))
        return [self.nested(part) for part in parts]

    def _unions(self) -> list[list[ParameterSchema]]:
        """The alternatives of each union."""
        lists = [_list_of(self.schema.get(name)) for name in _UNIONS]
        return [[self.nested(option) for option in options] for options in lists if options]

    def _find_types(self) -> frozenset[str]:
        schema = self.schema
        types = _named_types(schema.get("type"))
        if "const" in schema:
            types &= {type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            types &= {type_of(value) for value in schema["enum"]}
        for part in self._conjuncts():
            types &= part.types
        for options in self._unions():
            types &= frozenset[str]().union(*(option.types for option in options))
        if types == ALL_TYPES:
            hints = {"properties": "object", "items": "array"}
            types = frozenset(hints[key] for key in hints if key in schema) or ALL_TYPES
        return types | {"null"} if schema.get("nullable") is True else types

    def _find_choices(self) -> list[Any] | None:
        if "const" in self.schema:
            return [self.schema["const"]]
        if isinstance(self.schema.get("enum"), list):
            return [value for value in self.schema["enum"] if type_of(value) in self.types]
        for part in self._conjuncts():
            if part.choices is not None:
                return part.choices
        for options in self._unions():
            lists = [[None] if option.types == {"null"} else option.choices for option in options]
            if all(lists):
                return [value for values in lists for value in values or ()]
        return None

    def _find_options(self) -> list[ParameterSchema]:
        conjuncts, unions = self._conjuncts(), self._unions()
        if "properties" in self.schema or len(conjuncts) + len(unions) != 1:
            return []
        return conjuncts or unions[0]

    def _find_keyword(self, name: str) -> Any:
        if name in self.schema:
            return self.schema[name]
        parts = self._conjuncts()
        for options in self._unions():
            options = [option for option in options if option.types != {"null"}]
            parts += options if len(options) == 1 else []
        values = (part.keyword(name) for part in parts)
        return next((value for value in values if value is not None), None)

    def _find_forms(self) -> list[ObjectForm]:
        properties, required = self.schema.get("properties"), self.schema.get("required")
        local_properties = properties if isinstance(properties, dict) else {}
        forms: list[ObjectForm] = [(dict(local_properties), list(_list_of(required)))]
        for alternatives in (
            *(part.forms for part in self._conjuncts()),
            *([form for option in options for form in option.forms] for options in self._unions()),
        ):
            forms = [_both(*pair) for pair in product(forms, alternatives)]
            if len(forms) > _MAX_FORMS:
                forms = [_any_of(forms)]
        return forms

    def _find_property(self, key: str) -> ParameterSchema | None:
        schemas = []
        properties, patterns = self.schema.get("properties"), self.schema.get("patternProperties")
        if isinstance(properties, dict) and key in properties:
            schemas.append(self.nested(properties[key]))
        for pattern, schema in patterns.items() if isinstance(patterns, dict) else ():
            if _matches(pattern, key):
                schemas.append(self.nested(schema))
        schemas += [
            subschema for part in self._conjuncts() if (subschema := part.property(key)) is not None
        ]
        branches = [
            self.nested(self.schema[name]) for name in ("then", "else") if name in self.schema
        ]
        for options in (*self._unions(), branches):
            alternatives = [
                subschema for option in options if (subschema := option.property(key)) is not None
            ]
            if alternatives:
                schemas.append(
                    self.nested({"anyOf": [subschema.schema for subschema in alternatives]})
                )
        if not schemas:
            additional = self.schema.get("additionalProperties")
            return self.nested(additional) if isinstance(additional, dict) and additional else None
        if len(schemas) == 1:
            return schemas[0]
        return self.nested({"allOf": [subschema.schema for subschema in schemas]})


def type_of(value: Any) -> str:
    """Return a value's JSON type; "integer" for every whole number, also for `1.0`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _named_types(named: Any) -> frozenset[str]:
    names = named if isinstance(named, list) else [named]
    types = {TYPE_ALIASES.get(name, name) for name in names if isinstance(name, str)} & ALL_TYPES
    if "number" in types:
        types.add("integer")
    return frozenset(types) or ALL_TYPES


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _matches(pattern: Any, key: str) -> bool:
    try:
        return re.search(pattern, key) is not None
    except (re.error, TypeError):
        return False


def _both(first: ObjectForm, second: ObjectForm) -> ObjectForm:
    """Return the object form that has the properties of both forms."""
    properties = dict(first[0])
    for key, schema in second[0].items():
        properties[key] = {"allOf": [properties[key], schema]} if key in properties else schema
    return properties, [*first[1], *(key for key in second[1] if key not in first[1])]


def _any_of(forms: list[ObjectForm]) -> ObjectForm:
    """Merge forms into one that has all properties, and requires those that every form requires."""
    schemas: dict[str, list[Any]] = {}
    for properties, _ in forms:
        for key, schema in properties.items():
            if schema not in schemas.setdefault(key, []):
                schemas[key].append(schema)
    merged = {
        key: {"anyOf": variants} if len(variants) > 1 else variants[0]
        for key, variants in schemas.items()
    }
    return merged, [key for key in forms[0][1] if all(key in required for _, required in forms)]


def _moved(schema: Any) -> Any:
    """Return a copy whose references begin at `#/$defs/root`."""
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/root{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value)
        for key, value in schema.items()
    }
