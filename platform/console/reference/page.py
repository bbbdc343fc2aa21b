"""What the page shows: groups of operations and the shapes that they name, and the page itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.html import escape
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from catalog.access import access_served_models
from catalog.models import DesiredState
from console.mounting import mounted
from console.reference.examples import BODIES, MODEL, PARTS, curl
from console.reference.shapes import PREFIX, Row, kind_of, rows_of
from console.tenancy import first_tenant
from inference.openapi.document import document

#: Stands for this installation's address until it's known.
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
    """The page. Open to all, as the document is; examples name a model of the reader's."""
    described = document()
    context = {
        "info": described["info"],
        "groups": groups(),
        "operations": operations(),
        "base": BASE,
    }
    response = render(request, "console/reference.html", context)
    text = response.content.decode()
    text = text.replace(BASE, escape(request.build_absolute_uri(mounted("/")).rstrip("/")))
    model = _model(request)
    if model != MODEL:
        text = text.replace(f"&quot;{MODEL}&quot;", f"&quot;{escape(model)}&quot;")
        text = text.replace(f"/v1/models/{MODEL}", f"/v1/models/{escape(model)}")
    response.content = text.encode()
    return response


def _model(request: HttpRequest) -> str:
    """One that the reader may ask."""
    user: Any = request.user
    tenant = first_tenant(user) if user.is_authenticated else None
    if tenant is None:
        return MODEL
    loaded = access_served_models(tenant).filter(desired_state=DesiredState.LOADED)
    return str(loaded.order_by("name").values_list("name", flat=True).first() or MODEL)


@cache
def operations() -> SafeString:
    """Most of the page, which takes half a second to render."""
    context = {"groups": groups(), "shapes": shapes(), "base": BASE}
    return render_to_string("console/reference_operations.html", context)


@cache
def groups() -> list[Group]:
    """All operations, in the document's order of groups."""
    described = document()
    found = {
        each["name"]: Group(each["name"], each["name"].lower(), each["description"])
        for each in described["tags"]
    }
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            found[operation["tags"][0]].operations.append(_operation(method, path, operation))
    return [each for each in found.values() if each.operations]


@cache
def shapes() -> list[Shape]:
    """All named schemas with fields, by name."""
    schemas = document()["components"]["schemas"]
    return [
        Shape(name, schema.get("description", ""), rows_of(schema))
        for name, schema in sorted(schemas.items())
    ]


def _operation(method: str, path: str, operation: dict[str, Any]) -> Operation:
    kinds = operation.get("requestBody", {}).get("content", {})
    content = kinds.get(JSON) or next(iter(kinds.values()), {})
    answers = operation["responses"]
    good = next(each for code, each in answers.items() if code.startswith("2"))
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
            (code, _answer_shape(each)) for code, each in answers.items() if code.startswith("2")
        ],
        streams=EVENTS in good.get("content", {}),
        multipart=multipart,
    )


def _parameters(operation: dict[str, Any], place: str) -> list[Row]:
    return [
        Row(
            each["name"],
            kind_of(each.get("schema", {})),
            each.get("required", False),
            each.get("description", ""),
        )
        for each in operation.get("parameters", ())
        if each["in"] == place
    ]


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").removeprefix(PREFIX)
    found: dict[str, Any] = document()["components"]["schemas"].get(name, schema)
    return found


def _answer_shape(answer: dict[str, Any]) -> str:
    """The name of the shape of an answer's JSON, "" for none."""
    schema = answer.get("content", {}).get(JSON, {}).get("schema", {})
    return str(schema.get("$ref", "")).removeprefix(PREFIX)


__all__ = ["BODIES", "groups", "reference", "shapes"]
