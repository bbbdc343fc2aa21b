"""An OpenTelemetry collector: takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE_S = 60.0


@dataclass
class Span:
    """One span. Ids are hexadecimal, "" for no parent. `links`: trace and span of each."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...] = ()


@dataclass
class Collector:
    """What came in. `raw`: the bodies, to look for what must not be in them."""

    url: str
    spans: list[Span] = field(default_factory=list)
    raw: bytearray = field(default_factory=bytearray)

    def receive(self, body: bytes) -> None:
        """Add an export's spans."""
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]

    def wait(self, condition: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans, once `condition` says that those wanted are there."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if condition(list(self.spans)):
                return list(self.spans)
            time.sleep(0.05)
        raise AssertionError(f"Only these came: {self.spans}")


def _values(attributes: Any) -> dict[str, Any]:
    values = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        if kind == "array_value":
            value = [
                getattr(field_value, field_value.WhichOneof("value"))
                for field_value in value.values
            ]
        values[attribute.key] = value
    return values


def _span(service: str, span: Any) -> Span:
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    links = tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links)
    return Span(service, span.name, *ids, _values(span.attributes), links)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.receive(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing: pytest's output is for pytest."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
