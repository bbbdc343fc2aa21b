"""docs/inventory.md: request fields, routes and metrics of vLLM's manuals beside ours.

The data file names them; what becomes of each is asked of the schemas, the URLs and a scrape.
"""

from __future__ import annotations

import re

from django.urls import Resolver404, resolve

from engine.contract.errors import InvalidRequest
from inference.metrics.exposition import exposition, process_metric_families
from inference.schemas.base import GenerateRequest
from inference.schemas.chat import ChatRequest
from inference.schemas.completions import CompletionRequest
from inference.serving.respond import parse
from inference.web.views import path_not_found
from tools.docs.vllm_inventory import (
    ALWAYS_0,
    BOTH,
    CHAT,
    COMPLETIONS,
    METRICS,
    OTHER_METRICS,
    ROUTES,
    WITHOUT_EFFECT,
)

EFFECTIVE, IGNORED = "effective", "ignored"
HEAD = """# vLLM's request fields, routes and metrics

Made by `manage.py arguments --inventory -o docs/inventory.md`; tests hold it to the code. Command
line and environment: [arguments](arguments.md). What each endpoint does: [the API](api.md).
"""
SCHEMAS: tuple[tuple[type[GenerateRequest], str, dict[str, object]], ...] = (
    (ChatRequest, BOTH + CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    (CompletionRequest, f"{BOTH} {COMPLETIONS}", {"prompt": "x"}),
)


def inventory() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_fields(), *_routes(), *_metrics()])


def field_outcome(schema: type[GenerateRequest], name: str) -> str:
    """`EFFECTIVE`, `IGNORED`, or the sentence that refuses it."""
    if name in schema.model_fields:
        return EFFECTIVE
    if name not in schema.UNSUPPORTED:
        return IGNORED
    body = next(body for each, _, body in SCHEMAS if each is schema)
    try:
        parse(schema, {**body, name: {"any": "thing"}})
    except InvalidRequest as error:
        return error.message
    raise LookupError(f"{name} is said to be unsupported and was taken.")


def has_route(method: str, path: str) -> bool:
    """Whether an endpoint answers this method at this very path."""
    try:
        view = resolve(path, "inference.urls").func.cls
    except Resolver404:
        return False
    return not getattr(view, "is_not_found_view", False) and hasattr(view, method.lower())


def live_metrics() -> dict[str, str]:
    """The kind of each family of a scrape."""
    text = exposition({}, [], {"here": process_metric_families()}).decode()
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE))


def _fields() -> list[str]:
    rows = []
    for name in sorted(f"{BOTH} {CHAT} {COMPLETIONS}".split()):
        cells = [_field(schema, name) if name in of.split() else "" for schema, of, _ in SCHEMAS]
        rows.append(f"| `{name}` | {' | '.join(cells)} | {WITHOUT_EFFECT.get(name, '')} |")
    return [
        "## Request fields",
        "",
        "An empty cell: the manuals don't have the field there. An ignored one is named in the",
        "header `x-quire-ignored-fields`.",
        "",
        "| field | `/v1/chat/completions` | `/v1/completions` | instead, or why |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _field(schema: type[GenerateRequest], name: str) -> str:
    outcome = field_outcome(schema, name)
    if outcome in (EFFECTIVE, IGNORED):
        return outcome
    refused = f"refused: {outcome.removesuffix('.')}"
    neutral = [f"`{value}`" for value in schema.UNSUPPORTED[name]]
    return f"no-op as {', '.join(neutral)}, else {refused}" if neutral else refused


def _routes() -> list[str]:
    rows = []
    for route in sorted(ROUTES, key=lambda route: route.path):
        here = "the same"
        if not has_route(route.method, route.path):
            refusal = f"404: {path_not_found(route.path).message.removesuffix('.')}"
            here = f"`{route.ours}`" if route.ours else f"not here; {refusal}"
        rows.append(f"| `{route.method} {route.path}` | {here} | {route.note} |")
    return ["## Routes", "", "| route | here | |", "|---|---|---|", *rows, ""]


def _metrics() -> list[str]:
    live, rows = live_metrics(), []
    for kind, names in METRICS.items():
        for name in sorted(names.split()):
            here = "the same" if live.get(name) == kind else "not here"
            note = "always 0: nothing is swapped" if name in ALWAYS_0 else OTHER_METRICS.get(name)
            rows.append(f"| `{name}` | {kind} | {here} | {note or ''} |")
    head = ["## Metrics", "", "[Observability](observability.md) has more, and what they count."]
    return [*head, "", "| metric | kind | here | |", "|---|---|---|---|", *rows, ""]
