"""The API reference page: operations in groups, each with a runnable example, and schemas."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.html import escape
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from catalog.access import access_served_models
from catalog.models import DesiredState
from console.mounting import mounted
from console.views.base import current_tenant
from engine.contract.errors import QuireError
from inference.openapi import document
from tenants.access import access_role
from tenants.models import Role, Tenant

#: Placeholder in the examples for the name of a model that the reader may use.
MODEL = "MODEL"
_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
_TEXTS = {"model": MODEL, "input": ["A fox ran.", "A fox slept."]}
_RANKING = {"model": MODEL, "query": "What is a fox?", "documents": ["An animal.", "A river."]}
_PAIRS = {"model": MODEL, "text_1": "A fox ran.", "text_2": ["An animal moved.", "It rained."]}
_RESPONSE = {"model": MODEL, "input": "Say hello."}
_TOKENS = {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}}
_LORA = {"lora_name": "pirate", "lora_path": "/path/to/adapter"}
_FUNCTION = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}

BODIES: dict[str, Any] = {
    "/v1/chat/completions": {**_CHAT, "stream": True},
    "/v1/chat/completions/batch": {
        "model": MODEL,
        "messages": [_CHAT["messages"], [{"role": "user", "content": "Say goodbye."}]],
    },
    "/v1/chat/completions/render": {
        **_CHAT,
        "tools": [{"type": "function", "function": _FUNCTION}],
    },
    "/v1/chat/completions/{completion_id}": {"metadata": {"topic": "greetings"}},
    "/v1/responses": _RESPONSE,
    "/v1/responses/render": _RESPONSE,
    "/v1/responses/input_tokens": _RESPONSE,
    "/v1/responses/compact": {
        "model": MODEL,
        "input": [
            {"role": "user", "content": "My dog is called Rex."},
            {"role": "assistant", "content": "A fine name!"},
        ],
    },
    "/v1/conversations": {
        "items": [{"type": "message", "role": "user", "content": "My dog is called Rex."}],
        "metadata": {"topic": "dogs"},
    },
    "/v1/conversations/{conversation_id}": {"metadata": {"topic": "greetings"}},
    "/v1/conversations/{conversation_id}/items": {
        "items": [{"type": "message", "role": "user", "content": "Say hello."}]
    },
    "/v1/completions": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32},
    "/v1/completions/render": {"model": MODEL, "prompt": "Once upon a time"},
    "/generate": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32},
    "/invocations": {**_CHAT, "max_tokens": 32},
    "/v1/messages": {**_CHAT, "max_tokens": 64},
    "/v1/messages/batches": {
        "requests": [{"custom_id": "1", "params": {**_CHAT, "max_tokens": 64}}]
    },
    "/v1/messages/count_tokens": _CHAT,
    "/v1/messages/render": {**_CHAT, "max_tokens": 64},
    "/v1/embeddings": _TEXTS,
    "/v1/moderations": {"model": MODEL, "input": "A fox ran."},
    "/pooling": _TEXTS,
    "/classify": _TEXTS,
    "/v1/classify": _TEXTS,
    "/score": _PAIRS,
    "/v1/score": _PAIRS,
    "/rerank": _RANKING,
    "/v1/rerank": _RANKING,
    "/v2/rerank": _RANKING,
    "/v1/uploads": {
        "bytes": 1000,
        "filename": "batch.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "batch",
    },
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_00000000000000000000000000000000"]},
    "/v1/batches": {
        "input_file_id": "file-00000000000000000000000000000000",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "/tokenize": {"model": MODEL, "prompt": "A fox ran."},
    "/detokenize": {"model": MODEL, "tokens": [1, 2, 3]},
    "/inference/v1/generate": _TOKENS,
    "/v1/generate": _TOKENS,
    "/abort_requests": {"request_ids": ["chatcmpl-00000000000000000000000000000000"]},
    "/collective_rpc": {"method": "check_integrity"},
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": {"lora_name": "pirate"},
}
#: Example values of path parameters; the ids don't exist.
PARTS = {
    "model": MODEL,
    "batch_id": "batch_00000000000000000000000000000000",
    "completion_id": "chatcmpl-00000000000000000000000000000000",
    "conversation_id": "conv_00000000000000000000000000000000",
    "item_id": "msg_00000000000000000000000000000000",
    "upload_id": "upload_00000000000000000000000000000000",
    "file_id": "file-00000000000000000000000000000000",
    "response_id": "resp_00000000000000000000000000000000",
}
_MESSAGE_BATCH = "msgbatch_00000000000000000000000000000000"
#: Query string that the shell expands.
_SINCE = '"?start_time=$(($(date +%s) - 86400))"'
_FILE = (
    'echo \'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": '
    f"{json.dumps(_CHAT)}}}' > batch.jsonl\n"
)


def curl(method: str, path: str, base: str, *, multipart: bool = False) -> str:
    """The operation as a curl command with the key from QUIRE_API_KEY."""
    parts = PARTS if not path.startswith("/v1/messages/") else PARTS | {"batch_id": _MESSAGE_BATCH}
    address = shlex.quote(base + path.format(**parts))
    if path.startswith("/v1/organization/"):
        address += _SINCE
    lines = [f"curl {address}"]
    if method not in ("get", "post"):
        lines[0] += f" -X {method.upper()}"
    lines.append('-H "Authorization: Bearer $QUIRE_API_KEY"')
    if path.startswith("/v1/audio/"):
        return _joined([*lines, "-F model=MODEL", "-F file=@speech.wav"])
    if multipart and path != "/v1/files":
        return _FILE + _joined([*lines, "-F data=@batch.jsonl"])
    if multipart:
        return _FILE + _joined([*lines, "-F purpose=batch", "-F file=@batch.jsonl"])
    body = BODIES.get(path) if method == "post" else None
    if body is None:
        return _joined([*lines, "-X POST"] if method == "post" else lines)
    lines += ['-H "Content-Type: application/json"', "-d @- <<'JSON'"]
    return f"{_joined(lines)}\n{json.dumps(body, indent=2)}\nJSON"


def _joined(parts: list[str]) -> str:
    return " \\\n  ".join(parts)


PREFIX = "#/components/schemas/"
#: Schema keyword -> text for the reader.
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
MAX_VALUES = 12


@dataclass(frozen=True)
class Word:
    """Part of a type: plain text, or the name of a schema to link to."""

    text: str
    shape: str = ""


@dataclass(frozen=True)
class Row:
    """A field. `kind`: its type. `bounds`: constraints and default."""

    name: str
    kind: list[Word]
    required: bool = False
    text: str = ""
    bounds: list[str] = field(default_factory=list)


def rows_of(schema: dict[str, Any]) -> list[Row]:
    """The fields of an object, required ones first."""
    required = set(schema.get("required", ()))
    rows = [
        Row(name, kind_of(spec), name in required, spec.get("description", ""), bounds_of(spec))
        for name, spec in schema.get("properties", {}).items()
    ]
    return sorted(rows, key=lambda row: not row.required)


def kind_of(schema: dict[str, Any]) -> list[Word]:
    """The type in words; "null" is omitted from unions."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(PREFIX)
        return [Word(name, name)]
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options:
        words: list[Word] = []
        for option in options:
            if option.get("type") != "null":
                words += [Word(" or "), *kind_of(option)] if words else kind_of(option)
        return words or [Word("null")]
    if "const" in schema:
        return [Word(repr(schema["const"]))]
    if values := schema.get("enum"):
        texts = [str(value) for value in values[:MAX_VALUES]]
        if len(values) > MAX_VALUES:
            texts.append("…")
        return [Word(" | ".join(texts))]
    kind = schema.get("type", "anything")
    if kind == "array":
        return [Word("list of "), *kind_of(schema.get("items") or {})]
    if isinstance(kind, list):
        return [Word(" or ".join(name for name in kind if name != "null"))]
    if schema.get("format") == "binary":
        return [Word("a file")]
    return [Word({"object": "object", "integer": "whole number"}.get(kind, kind))]


def bounds_of(schema: dict[str, Any]) -> list[str]:
    """Constraints and default of a field, in words."""
    bounds = []
    for option in (schema, *schema.get("anyOf", ())):
        bounds += [text.format(option[name]) for name, text in BOUNDS.items() if name in option]
    default = schema.get("default")
    if default not in (None, "", [], {}):
        bounds.append(f"default {json.dumps(default)}")
    return bounds


#: Placeholder for the server's address in cached markup.
BASE = "http://BASE"
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass
class Operation:
    """A method of a path."""

    method: str
    path: str
    slug: str
    summary: str
    text: str
    example: str
    body: str = ""
    query: list[Row] = field(default_factory=list)
    headers: list[Row] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)
    fields: list[Row] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)
    streams: bool = False
    multipart: bool = False


@dataclass
class Group:
    """Operations under one heading."""

    name: str
    slug: str
    text: str
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Shape:
    """A named schema."""

    name: str
    text: str
    rows: list[Row]


@require_safe
def reference(request: HttpRequest) -> HttpResponse:
    """The page, public like the OpenAPI document; examples name a model that the reader may use."""
    described = document()
    user: Any = request.user
    context = {
        "info": described["info"],
        "groups": groups(),
        "operations": operations(),
        "base": BASE,
    }
    tenant = _tenant(request)
    if tenant is not None and access_role(user, tenant).rank >= Role.MEMBER.rank:
        context["keys_url"] = reverse("api-keys-list", args=[tenant.slug])
    response = render(request, "console/reference.html", context)
    text = response.content.decode()
    text = text.replace(BASE, escape(request.build_absolute_uri(mounted("/")).rstrip("/")))
    model = _model(tenant)
    if model != MODEL:
        text = text.replace(f"&quot;{MODEL}&quot;", f"&quot;{escape(model)}&quot;")
        text = text.replace(f"/v1/models/{MODEL}", f"/v1/models/{escape(model)}")
    response.content = text.encode()
    return response


def _tenant(request: Any) -> Tenant | None:
    """The reader's tenant; None without a login or tenant, or if the request names another's."""
    try:
        return current_tenant(request) if request.user.is_authenticated else None
    except QuireError:
        return None


def _model(tenant: Tenant | None) -> str:
    """A loaded model available to the tenant, or the placeholder."""
    if tenant is None:
        return MODEL
    loaded = access_served_models(tenant).filter(desired_state=DesiredState.LOADED)
    return str(loaded.order_by("name").values_list("name", flat=True).first() or MODEL)


@cache
def operations() -> SafeString:
    """The rendered operations, cached because rendering takes half a second."""
    context = {"groups": groups(), "shapes": shapes(), "base": BASE}
    return render_to_string("console/reference_operations.html", context)


@cache
def groups() -> list[Group]:
    """All operations, grouped by tag in the order of the document."""
    described = document()
    groups = {
        tag["name"]: Group(tag["name"], tag["name"].lower(), tag["description"])
        for tag in described["tags"]
    }
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            groups[operation["tags"][0]].operations.append(_operation(method, path, operation))
    return [group for group in groups.values() if group.operations]


@cache
def shapes() -> list[Shape]:
    """All named schemas with fields, by name."""
    schemas = document()["components"]["schemas"]
    return [
        Shape(name, schema.get("description", ""), rows_of(schema))
        for name, schema in sorted(schemas.items())
    ]


def _operation(method: str, path: str, operation: dict[str, Any]) -> Operation:
    kinds: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    content: dict[str, Any] = kinds.get(JSON) or next(iter(kinds.values()), {})
    answers = operation["responses"]
    success = next(answer for code, answer in answers.items() if code.startswith("2"))
    multipart = bool(kinds) and JSON not in kinds
    example = curl(method, path, BASE, multipart=multipart)
    return Operation(
        method=method,
        path=path,
        slug=f"{method}-{path.strip('/').replace('/', '-').translate(str.maketrans('', '', '{}'))}",
        summary=operation["summary"],
        text=operation.get("description", ""),
        example=example,
        body=example.partition("<<'JSON'\n")[2].removesuffix("\nJSON"),
        query=_parameters(operation, "query"),
        headers=_parameters(operation, "header"),
        parts=[(name, PARTS[name]) for name in PARTS if f"{{{name}}}" in path],
        fields=rows_of(_resolved(content.get("schema", {}))),
        answers=[
            (code, _answer_shape(answer))
            for code, answer in answers.items()
            if code.startswith("2")
        ],
        streams=EVENTS in success.get("content", {}),
        multipart=multipart,
    )


def _parameters(operation: dict[str, Any], location: str) -> list[Row]:
    return [
        Row(
            parameter["name"],
            kind_of(parameter.get("schema", {})),
            parameter.get("required", False),
            parameter.get("description", ""),
        )
        for parameter in operation.get("parameters", ())
        if parameter["in"] == location
    ]


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").removeprefix(PREFIX)
    resolved: dict[str, Any] = document()["components"]["schemas"].get(name, schema)
    return resolved


def _answer_shape(answer: dict[str, Any]) -> str:
    """Name of the schema of a JSON response; "" for none."""
    schema = answer.get("content", {}).get(JSON, {}).get("schema", {})
    return str(schema.get("$ref", "")).removeprefix(PREFIX)


__all__ = ["BODIES", "groups", "reference", "shapes"]
