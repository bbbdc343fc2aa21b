"""One HTTP request on an external processing stream: reads headers and body, sets the endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any

from inference.endpoint_picker.messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    OVERWRITE_IF_EXISTS_OR_ADD,
    ProcessingResponse,
)
from inference.endpoint_picker.picker import EndpointPicker
from inference.endpoint_picker.request import RequestFacts

#: Names of the endpoint picker protocol.
DESTINATION = "x-gateway-destination-endpoint"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
METADATA_NAMESPACE = "envoy.lb"


class RequestProcessor:
    """Collects a request and routes it. Then the stream is closed cleanly, so that the proxy sends
    no more messages and a picker that shuts down interrupts no response.
    """

    def __init__(self, picker: EndpointPicker, max_body_bytes: int) -> None:
        self._picker, self._max_body_bytes = picker, max_body_bytes
        self._headers: dict[str, str] = {}
        self._subset: Collection[str] | None = None
        self._buffered = False
        self._chunks: list[bytes] = []

    async def run(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Read `ProcessingRequest`s and yield `ProcessingResponse`s until the request is routed."""
        num_bytes = 0
        async for message in messages:
            if message.HasField("protocol_config"):
                mode = message.protocol_config.request_body_mode
                self._buffered = mode in (BUFFERED, BUFFERED_PARTIAL)
            if message.HasField("request_headers"):
                self._read_headers(message)
                if message.request_headers.end_of_stream:
                    for response in self._route(None):
                        yield response
                    return
                if self._buffered:
                    # The proxy sends the body after this.
                    yield ProcessingResponse(request_headers={})
            elif message.HasField("request_body"):
                self._chunks.append(message.request_body.body)
                num_bytes += len(message.request_body.body)
                if num_bytes > self._max_body_bytes:
                    yield _refusal(413, f"The body has more than {self._max_body_bytes} bytes.")
                    return
                if message.request_body.end_of_stream:
                    for response in self._route(message):
                        yield response
                    return
            elif message.HasField("request_trailers"):
                for response in self._route(message):
                    yield response
                return

    def _read_headers(self, message: Any) -> None:
        for header in message.request_headers.headers.headers:
            value = header.value or header.raw_value.decode("latin-1")
            self._headers[header.key.lower()] = value
        for entry in message.metadata_context.filter_metadata:
            if entry.key == SUBSET_NAMESPACE and SUBSET in entry.value.fields:
                values = entry.value.fields[SUBSET].list_value.values
                self._subset = {value.string_value for value in values}

    def _route(self, last: Any) -> Iterator[Any]:
        """The response to a complete request; `last`: its last message, None for its headers."""
        body = b"".join(self._chunks)
        endpoints = self._picker.pick(RequestFacts.from_http(self._headers, body, self._subset))
        if not endpoints:
            yield _refusal(503, "No endpoint is ready.")
            return
        value = ",".join(endpoints)
        header = {
            "header": {"key": DESTINATION, "raw_value": value.encode()},
            "append_action": OVERWRITE_IF_EXISTS_OR_ADD,
        }
        common = {"header_mutation": {"set_headers": [header]}, "clear_route_cache": True}
        if self._buffered and last is not None:
            answer = ProcessingResponse(request_body={"response": common})
            _set_metadata(answer, value)
            yield answer
            return
        answer = ProcessingResponse(request_headers={"response": common})
        _set_metadata(answer, value)
        yield answer
        trailers = last is not None and last.HasField("request_trailers")
        for index, chunk in enumerate(self._chunks):
            streamed = {
                "body": chunk,
                "end_of_stream": not trailers and index == len(self._chunks) - 1,
            }
            mutation = {"body_mutation": {"streamed_response": streamed}}
            yield ProcessingResponse(request_body={"response": mutation})
        if trailers:
            yield ProcessingResponse(request_trailers={})


def _set_metadata(answer: Any, value: str) -> None:
    answer.dynamic_metadata.update({METADATA_NAMESPACE: {DESTINATION: value}})


def _refusal(status: int, message: str) -> Any:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    content_type = {"header": {"key": "content-type", "raw_value": b"application/json"}}
    return ProcessingResponse(
        immediate_response={
            "status": {"code": status},
            "headers": {"set_headers": [content_type]},
            "body": json.dumps({"error": error}).encode(),
        }
    )
