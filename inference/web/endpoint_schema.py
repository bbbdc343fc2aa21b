"""`EndpointSchema`: what the OpenAPI document says about a view, declared on the view."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import uritemplate
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter

JSON, EVENT_STREAM = "application/json", "text/event-stream"

#: Error statuses of endpoints that need no key, and of those that do.
PUBLIC_ERRORS = (400, 406, 408, 413, 500, 503)
KEY_ERRORS = (*PUBLIC_ERRORS, 401, 403, 429)
#: Additional error statuses of requests with a body. 409 and 422 come from idempotency keys.
BODY_ERRORS = (404, 409, 415, 422)

#: Parameters of lists, as `parse_page_query` reads them.
PAGE_PARAMETERS = (
    OpenApiParameter("after", str, description="The id of the last object that you have."),
    OpenApiParameter("limit", int, description="Objects on a page."),
    OpenApiParameter("order", str, enum=["asc", "desc"]),
)
IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    str,
    OpenApiParameter.HEADER,
    description="The same request with the same key runs once within a day.",
)


@dataclass(frozen=True)
class Endpoint:
    """One method of a view. Its description is the method's docstring.

    Schemas are pydantic models, `OpenApiTypes` or plain JSON schemas.

    Attributes:
        summary: title in the reference.
        response: schema of the JSON body of a 200.
        request: schema of the body, or schemas by media type; None for no body.
        streams: whether a 200 can also be a stream of server-sent events.
        parameters: query parameters and headers; those in the path are added.
        media_types: schemas of a 200 that isn't JSON, by media type.
        responses: schemas of further JSON bodies by status.
        operation_id: replaces the one made from path and method.
    """

    summary: str
    response: Any
    request: Any = None
    streams: bool = False
    parameters: tuple[OpenApiParameter, ...] = ()
    media_types: dict[str, Any] = field(default_factory=dict)
    responses: dict[int, Any] = field(default_factory=dict)
    operation_id: str = ""


class EndpointSchema(AutoSchema):
    """The methods of a view by name, in one group of the reference.

    Which errors a method can answer follows from the view and the method.
    """

    def __init__(self, tag: str, **endpoints: Endpoint) -> None:
        super().__init__()
        self.tag = tag
        self.endpoints = endpoints

    @property
    def endpoint(self) -> Endpoint:
        """The method that is being described."""
        return self.endpoints[self.method.lower()]

    def get_tags(self) -> list[str]:
        return [self.tag]

    def get_summary(self) -> str:
        return self.endpoint.summary

    def get_operation_id(self) -> str:
        return self.endpoint.operation_id or super().get_operation_id()

    def get_override_parameters(self) -> list[Any]:
        return list(self.endpoint.parameters)

    def get_request_serializer(self) -> Any:
        return self.endpoint.request

    def get_response_serializers(self) -> Any:
        endpoint = self.endpoint
        media_types = {JSON: endpoint.response, **endpoint.media_types}
        if endpoint.streams:
            media_types[EVENT_STREAM] = OpenApiTypes.STR
        responses = {
            **dict.fromkeys(self._error_statuses(), cast(Any, self.view).error_schema),
            **endpoint.responses,
        }
        return {(200, media_type): schema for media_type, schema in media_types.items()} | {
            (status, JSON): responses[status] for status in sorted(responses)
        }

    def _error_statuses(self) -> tuple[int, ...]:
        if cast(Any, self.view).public:
            return PUBLIC_ERRORS
        if self.method == "POST":
            return KEY_ERRORS + BODY_ERRORS
        if self.endpoint.parameters or uritemplate.variables(self.path):
            return (*KEY_ERRORS, 404)
        return KEY_ERRORS
