"""Each endpoint's entry in the document."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from pydantic import BaseModel

from inference.openapi import answers

#: What any endpoint may answer, by status.
READ = (400, 401, 403, 406, 408, 413, 429, 500, 503)
#: Besides, those that read a body; 409 and 422 are idempotency keys'.
WRITE = (*READ, 404, 409, 415, 422)
PUBLIC = (400, 406, 408, 413, 500, 503)

PAGE = (
    OpenApiParameter("after", str, description="The id of the last object that you have."),
    OpenApiParameter("limit", int, description="Objects on a page."),
    OpenApiParameter("order", str, enum=["asc", "desc"]),
)
KEY = OpenApiParameter(
    "Idempotency-Key",
    str,
    OpenApiParameter.HEADER,
    description="The same request with the same key runs once within a day.",
)
UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}


def errors(statuses: tuple[int, ...], envelope: type[BaseModel]) -> dict[Any, Any]:
    """The same envelope under each status."""
    return {(status, "application/json"): envelope for status in statuses}


def operation(
    tag: str,
    answer: Any,
    *,
    request: Any = None,
    streams: bool = False,
    statuses: tuple[int, ...] | None = None,
    envelope: type[BaseModel] = answers.ErrorAnswer,
    parameters: tuple[OpenApiParameter, ...] = (),
    extra: dict[Any, Any] | None = None,
    **more: Any,
) -> Any:
    """`extend_schema` for one of our endpoints: `streams` adds server-sent events."""
    chosen = statuses if statuses is not None else (WRITE if request is not None else READ)
    replies: dict[Any, Any] = {(200, "application/json"): answer}
    if streams:
        replies[(200, "text/event-stream")] = OpenApiTypes.STR
    return extend_schema(
        tags=[tag],
        request=request,
        responses=replies | errors(chosen, envelope) | (extra or {}),
        parameters=list(parameters),
        **more,
    )
