"""OpenAI's and vLLM's sampling fields, and their conversion to `SamplingParams`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict

from engine.contract.checkpoint_options import SAMPLING_DEFAULTS
from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import (
    MAX_LOGIT_BIAS,
    RepetitionDetectionParams,
    SamplingParams,
)
from engine.contract.structured_outputs import StructuredOutputsParams
from inference.errors import UnsupportedField, rename_error_param
from inference.schemas.base import GenerateRequest

_FORMAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: Accepted names of the only structured output backend.
_BACKENDS = ("auto", "guidance", "llguidance", "lm-format-enforcer", "outlines", "xgrammar")
#: Fields of `structured_outputs` that name the backend.
_BACKEND_FIELDS = ("backend", "_backend", "_backend_was_auto")
LEGACY_FIELDS = ("json", "regex", "choice", "grammar", "json_object")
STRUCTURED_FIELDS = tuple(spec.name for spec in msgspec.structs.fields(StructuredOutputsParams))


@dataclass(frozen=True)
class OutputConstraint:
    """Constraint on the output, and the client's names for its fields.

    Attributes:
        params: None for unconstrained output.
        source: the client's field, "" for none.
        names: field names in errors about `params` -> the client's names.
    """

    params: StructuredOutputsParams | None = None
    source: str = ""
    names: dict[str, str] = field(default_factory=dict)


class StructuredFields(BaseModel):
    """Fields that constrain the output's format; at most one may be set."""

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

    def constraint(self) -> OutputConstraint:
        """Return the constraint that the fields specify.

        Raises:
            InvalidRequest: several or invalid constraints, with the name of the client's field.
        """
        forms = [*self._formats(), *self._structured(), *self._legacy_guided_fields()]
        self._check_options()
        constraints = [_constraint(*form) for form in forms]
        if not constraints:
            return OutputConstraint()
        for other in constraints[1:]:  # the same constraint in two fields is valid
            if _normalized(other.params) != _normalized(constraints[0].params):
                raise InvalidRequest(
                    "Only one field may say what the output looks like; got "
                    f"{constraints[0].source} and {other.source}, which differ.",
                    param=other.source,
                )
        return constraints[0]

    def _formats(self) -> list[_Form]:
        response_format = self.response_format
        kind = None if response_format is None else response_format.get("type")
        if response_format is None or kind == "text":
            return []
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise InvalidRequest(
                f"response_format.type must be one of text, {', '.join(_FORMATS)}.",
                param="response_format.type",
            )
        return [("response_format", *_FORMATS[kind](response_format))]

    def _structured(self) -> list[_Form]:
        fields = self.structured_outputs
        if fields is None:
            return []
        for key in fields:
            if key not in (*STRUCTURED_FIELDS, *_BACKEND_FIELDS):
                name = f"structured_outputs.{key[:50]}"
                raise UnsupportedField(f"'{name}' is not supported.", param=name)
        values = {
            key: value
            for key, value in fields.items()
            if value is not None and key not in _BACKEND_FIELDS
        }
        tag = values.get("structural_tag")
        if isinstance(tag, dict):
            values["structural_tag"] = json.dumps(tag)
        return [("structured_outputs", {}, values)]

    def _legacy_guided_fields(self) -> list[_Form]:
        forms: list[_Form] = []
        for kind in LEGACY_FIELDS:
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
        inside = self.structured_outputs or {}
        for name, backend in (
            ("guided_decoding_backend", self.guided_decoding_backend),
            *((f"structured_outputs.{key}", inside.get(key)) for key in _BACKEND_FIELDS[:2]),
        ):
            if backend is not None and backend not in _BACKENDS:
                raise UnsupportedField(f"{name} must be one of {', '.join(_BACKENDS)}.", param=name)
        guided = self.guided_json is not None or self.guided_json_object
        if self.guided_whitespace_pattern is not None and not guided:
            raise InvalidRequest(
                "guided_whitespace_pattern needs guided_json or guided_json_object.",
                param="guided_whitespace_pattern",
            )


#: The client's field, our field names -> the client's, values for `StructuredOutputsParams`.
_Form = tuple[str, dict[str, str], dict[str, Any]]


def _constraint(source: str, names: dict[str, str], values: dict[str, Any]) -> OutputConstraint:
    """Return a field's constraint. Raises `InvalidRequest` with the name of the client's field."""
    names = {"structured_outputs": source, **names}
    try:
        params = StructuredOutputsParams(**values)
    except InvalidRequest as error:
        raise rename_error_param(error, names) from None
    return OutputConstraint(params, source, names)


def _normalized(params: StructuredOutputsParams | None) -> dict[str, Any]:
    """Normalize a constraint, so that a schema as text equals one as an object."""
    form = {} if params is None else msgspec.structs.asdict(params)
    if isinstance(form.get("json"), str):
        form["json"] = json.loads(form["json"])
    form.pop("disable_additional_properties", None)  # doesn't change the constraint
    return form


def _json_schema(response_format: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    param = "response_format.json_schema"
    body = response_format.get("json_schema")
    if not isinstance(body, dict):
        raise InvalidRequest(f"{param} must be an object with name and schema.", param=param)
    name, schema, strict = body.get("name"), body.get("schema"), body.get("strict")
    if not isinstance(name, str) or not _FORMAT_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.name must be 1 to 64 letters, digits, '_' or '-'.", param=f"{param}.name"
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{param}.strict must be true or false.", param=f"{param}.strict")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}.schema must be an object.", param=f"{param}.schema")
    values = {
        "json": schema,
        "disable_additional_properties": bool(strict),
    }
    return {"structured_outputs.json": f"{param}.schema"}, values


def _json_object(response_format: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    return {}, {"json_object": True}


def _structural_tag(response_format: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    tag = {key: value for key, value in response_format.items() if key != "type"}
    names = {"structured_outputs.structural_tag": "response_format"}
    return names, {"structural_tag": json.dumps(tag)}


_FORMATS: dict[str, Callable[[dict[str, Any]], tuple[dict[str, str], dict[str, Any]]]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "structural_tag": _structural_tag,
}


def _check_num_biases(biases: Any) -> Any:
    """Check the number of entries before pydantic validates each."""
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIAS:
        raise ValueError(f"may hold at most {MAX_LOGIT_BIAS} entries, got {len(biases)}.")
    return biases


class SamplingFields(StructuredFields, GenerateRequest):
    """Checks types alone; `SamplingParams` checks ranges. None: not set."""

    n: int | None = 1
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = False
    max_tokens: int | None = None
    min_tokens: int | None = 0
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    repetition_detection: dict[str, Any] | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_num_biases)] = None
    allowed_token_ids: list[int] | None = None
    vllm_xargs: dict[str, Any] | None = None

    def sampling_params(
        self,
        defaults: dict[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structured_outputs: StructuredOutputsParams | None,
    ) -> SamplingParams:
        """Convert to `SamplingParams`, with the model's defaults for fields that are not set.

        Raises:
            InvalidRequest: a value is invalid; it names the field.
        """
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs are not available when stream is true.", param="prompt_logprobs"
            )
        values: dict[str, Any] = {
            name: defaults[name]
            for name in SAMPLING_DEFAULTS
            if defaults.get(name) is not None and getattr(self, name) is None
        }
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.repetition_detection is not None:
            values["repetition_detection"] = _repetition_detection(self.repetition_detection)
        if self.vllm_xargs:
            values["extra_args"] = self.vllm_xargs
        if self.logit_bias:
            values["logit_bias"] = _logit_bias(self.logit_bias)
        if self.logprob_token_ids is not None:
            if logprobs is None:
                raise InvalidRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")
            # They replace the likeliest tokens, so the requested number of those doesn't matter.
            values["logprob_token_ids"] = list(dict.fromkeys(self.logprob_token_ids))
            logprobs = None
        try:
            return SamplingParams(
                **values,
                max_tokens=max_tokens,
                logprobs=logprobs,
                structured_outputs=structured_outputs,
            )
        except InvalidRequest as error:
            raise rename_error_param(error, {"extra_args": "vllm_xargs"}) from None


#: Fields that are converted, or that only affect how a prompt is truncated.
_CONVERTED = (
    "max_tokens",
    "logit_bias",
    "repetition_detection",
    "logprob_token_ids",
    "truncation_side",
    "vllm_xargs",
)
#: Fields that `SamplingParams` has under the same name.
_PASSED_ON = tuple(
    name
    for name in SamplingFields.model_fields
    if name not in GenerateRequest.model_fields
    and name not in StructuredFields.model_fields
    and name not in _CONVERTED
)


def _repetition_detection(fields: dict[str, Any]) -> RepetitionDetectionParams:
    """Convert the object's fields."""
    for name in fields:
        if name not in RepetitionDetectionParams.__struct_fields__:
            path = f"repetition_detection.{name[:50]}"
            raise UnsupportedField(f"'{path}' is not supported.", param=path)
    return RepetitionDetectionParams(**fields)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    """Convert string keys to token ids."""
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(biases)}.",
            param="logit_bias",
        )
    invalid = [key for key in biases if not (key.isascii() and key.isdigit() and len(key) <= 10)]
    if invalid:
        keys = ", ".join(repr(key[:50]) for key in invalid[:5])
        raise InvalidRequest(
            f"logit_bias has the keys {keys}, which aren't token ids."
            if len(invalid) > 1
            else f"logit_bias has the key {keys}, which isn't a token id.",
            param="logit_bias",
        )
    return {int(key): bias for key, bias in biases.items()}
