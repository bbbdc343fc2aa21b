"""Fields that say what an output must look like: OpenAI's, vLLM's, and vLLM's older ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from engine.contract.errors import InvalidRequest
from engine.contract.structured_outputs import StructuredOutputsParams
from inference.errors import UnsupportedField
from inference.generation.field_names import renamed

_FORMAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: There is one backend; these names mean it.
_BACKENDS = ("auto", "guidance", "llguidance")
_OLD = ("json", "regex", "choice", "grammar", "json_object")
_KNOWN = tuple(spec.name for spec in msgspec.structs.fields(StructuredOutputsParams))


@dataclass(frozen=True)
class Constraint:
    """What the output must look like, and the client's names of what said so.

    Attributes:
        params: None for anything.
        source: the client's field, "" for none.
        names: names in `params`' errors -> the client's.
    """

    params: StructuredOutputsParams | None = None
    source: str = ""
    names: dict[str, str] = field(default_factory=dict)


class StructuredFields(BaseModel):
    """At most one of the fields may name a form."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

    def constraint(self) -> Constraint:
        """The form that the fields name.

        Raises:
            InvalidRequest: more than one, or a bad one, by the name of the client's field.
        """
        found = [*self._formats(), *self._structured(), *self._guided()]
        if len(found) > 1:
            shown = " and ".join(source for source, _, _ in found)
            raise InvalidRequest(
                f"Only one field may say what the output looks like; got {shown}.",
                param=found[1][0],
            )
        self._check_options()
        if not found:
            return Constraint()
        source, names, values = found[0]
        names = {"structured_outputs": source, **names}
        try:
            return Constraint(StructuredOutputsParams(**values), source, names)
        except InvalidRequest as error:
            raise renamed(error, names) from None

    def _formats(self) -> list[_Form]:
        given = self.response_format
        kind = None if given is None else given.get("type")
        if given is None or kind == "text":
            return []
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise InvalidRequest(
                f"response_format.type must be one of text, {', '.join(_FORMATS)}.",
                param="response_format.type",
            )
        return [("response_format", *_FORMATS[kind](given))]

    def _structured(self) -> list[_Form]:
        given = self.structured_outputs
        if given is None:
            return []
        for key in given:
            if key not in _KNOWN:
                name = f"structured_outputs.{key[:50]}"
                raise UnsupportedField(f"'{name}' is not supported.", param=name)
        values = {key: value for key, value in given.items() if value is not None}
        tag = values.get("structural_tag")
        if isinstance(tag, dict):
            values["structural_tag"] = json.dumps(tag)
        return [("structured_outputs", {}, values)]

    def _guided(self) -> list[_Form]:
        forms: list[_Form] = []
        for kind in _OLD:
            name, value = f"guided_{kind}", getattr(self, f"guided_{kind}")
            if value is None or value is False:
                continue
            names = {f"structured_outputs.{kind}": name}
            values = {kind: value}
            if self.guided_whitespace_pattern is not None:
                pattern = "whitespace_pattern"
                names[f"structured_outputs.{pattern}"] = f"guided_{pattern}"
                values[pattern] = self.guided_whitespace_pattern
            forms.append((name, names, values))
        return forms

    def _check_options(self) -> None:
        backend = self.guided_decoding_backend
        if backend is not None and backend not in _BACKENDS:
            raise UnsupportedField(
                f"guided_decoding_backend must be one of {', '.join(_BACKENDS)}.",
                param="guided_decoding_backend",
            )
        guided = self.guided_json is not None or self.guided_json_object
        if self.guided_whitespace_pattern is not None and not guided:
            raise InvalidRequest(
                "guided_whitespace_pattern needs guided_json or guided_json_object.",
                param="guided_whitespace_pattern",
            )


#: The client's field, its names for ours, and the values for `StructuredOutputsParams`.
_Form = tuple[str, dict[str, str], dict[str, Any]]


def _json_schema(given: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    place = "response_format.json_schema"
    body = given.get("json_schema")
    if not isinstance(body, dict):
        raise InvalidRequest(f"{place} must be an object with name and schema.", param=place)
    name, schema, strict = body.get("name"), body.get("schema"), body.get("strict")
    if not isinstance(name, str) or not _FORMAT_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{place}.name must be 1 to 64 letters, digits, '_' or '-'.", param=f"{place}.name"
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{place}.strict must be true or false.", param=f"{place}.strict")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{place}.schema must be an object.", param=f"{place}.schema")
    values = {
        "json": schema,
        "disable_additional_properties": bool(strict),
    }
    return {"structured_outputs.json": f"{place}.schema"}, values


def _json_object(given: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    return {}, {"json_object": True}


def _structural_tag(given: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    tag = {key: value for key, value in given.items() if key != "type"}
    names = {"structured_outputs.structural_tag": "response_format"}
    return names, {"structural_tag": json.dumps(tag)}


_FORMATS: dict[str, Callable[[dict[str, Any]], tuple[dict[str, str], dict[str, Any]]]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "structural_tag": _structural_tag,
}
