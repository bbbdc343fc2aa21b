"""`StructuredOutputsParams`: the required form of an output. Torch-free; loads no backend."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.contract.errors import InvalidRequest
from engine.contract.validation import (
    check_choice,
    check_schema,
    check_source,
    check_structural_tag,
    format_value,
    is_valid_utf8,
)

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")
MAX_WHITESPACE_PATTERN = 256
#: Default white space between the parts of JSON: none, a space, or a line break and an indent, as
#: serializers write it. With more freedom a small model may generate white space endlessly.
JSON_WHITESPACE = r"(?: |\n(?: {0,24}|\t{0,12}))?"


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Exactly one of the first six fields defines the output's form; names are vLLM's.

    Attributes:
        json: a JSON Schema, as a dict or as JSON text.
        regex: the whole output matches it (Rust's `regex` syntax: no look-around, no
            back-references).
        choice: the output is one of these strings.
        grammar: EBNF in llama.cpp's form (GBNF) or in Lark's.
        json_object: True for any JSON object.
        structural_tag: JSON text {"structures": [{"begin", "schema", "end"}], "triggers": [...]}:
            free text until a trigger, then the tag's schema.
        disable_any_whitespace: JSON without white space.
        disable_additional_properties: objects of the schema have only the properties that it names;
            this is the default unless the schema has `additionalProperties`.
        whitespace_pattern: a regex for the white space between JSON's parts; None:
            `JSON_WHITESPACE`.

    Raises:
        InvalidRequest: with `param` "structured_outputs" or "structured_outputs.<field>".
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidRequest(
                f"json_object must be true or false, got {format_value(self.json_object)}.",
                param="structured_outputs.json_object",
            )
        if self.json_object is False:
            self.json_object = None
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            names = " and ".join(kinds) if kinds else "none"
            raise InvalidRequest(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; got {names}.",
                param="structured_outputs",
            )
        for name in _OPTIONS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(
                    f"{name} must be true or false.", param=f"structured_outputs.{name}"
                )
        self._check_whitespace()
        if self.json is not None:
            check_schema("structured_outputs.json", self.json)
        elif self.choice is not None:
            check_choice("structured_outputs.choice", self.choice)
        elif self.structural_tag is not None:
            check_structural_tag("structured_outputs.structural_tag", self.structural_tag)
        elif self.regex is not None:
            check_source("structured_outputs.regex", self.regex)
        elif self.grammar is not None:
            check_source("structured_outputs.grammar", self.grammar)

    def _check_whitespace(self) -> None:
        name, pattern = "structured_outputs.whitespace_pattern", self.whitespace_pattern
        if pattern is None:
            return
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_WHITESPACE_PATTERN:
            raise InvalidRequest(
                f"whitespace_pattern must be a regex of 1 to {MAX_WHITESPACE_PATTERN} characters.",
                param=name,
            )
        if not is_valid_utf8(pattern):
            raise InvalidRequest("whitespace_pattern holds a lone surrogate.", param=name)
        if self.disable_any_whitespace:
            raise InvalidRequest(
                "whitespace_pattern and disable_any_whitespace can't be used together.", param=name
            )

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)
