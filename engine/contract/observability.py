"""Tracing with OpenTelemetry: one exporter per process, W3C context between processes. Torch-free.

The packages are the extra `otel`; none is imported before a tracer is created.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer


VARIABLE = "QUIRE_LOGGING_CONFIG"


def logging_config() -> dict[str, Any] | None:
    """Content of the file named by the variable, for `logging.config.dictConfig`; None: no file.

    Raises `ConfigError` for a file that can't be read or doesn't contain a JSON object.
    """
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return None
    try:
        config = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{VARIABLE}: {name} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {name} isn't JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{VARIABLE}: {name} must hold a JSON object for logging's dictConfig.")
    return config


def apply_logging_config() -> bool:
    """Configure logging from that file. Returns whether there is one.

    Raises `ConfigError` if `dictConfig` refuses it.
    """
    config = logging_config()
    if config is None:
        return False
    try:
        logging.config.dictConfig(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = error.__cause__ or error
        raise ConfigError(f"{VARIABLE}: {error} ({reason})") from None
    return True


class LineFormatter(logging.Formatter):
    """vLLM's line format. Line breaks in messages are escaped, so that lines can't be forged."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s", "%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's line; a traceback, if any, follows on lines of its own."""
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the gateways' keys: at, level, logger, message, exception;
    lines about a request, and a gateway's access log, have additional fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; `at` is UTC in ISO 8601 with milliseconds."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "at": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "request", {}) | getattr(record, "access", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(level: str = "info") -> None:
    """Log to standard error, as JSON if `QUIRE_LOG_STYLE` is `json`.

    The file named by `QUIRE_LOGGING_CONFIG` replaces this completely. Raises `ConfigError` if it
    can't be used.
    """
    if apply_logging_config():
        return
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("QUIRE_LOG_STYLE") == "json"
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It logs complete addresses, including those that a hub has signed for one download.
    logging.getLogger("httpx").setLevel("WARNING")


#: Variables with the endpoint of gateways and replicas, if no flag names it.
TRACES_VARIABLE = "QUIRE_OTLP_TRACES_ENDPOINT"
_PATH = "/v1/traces"


def check_endpoint(endpoint: str) -> str:
    """The endpoint with its path. Raises `ConfigError` for an invalid address."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ConfigError(
            "otlp_traces_endpoint must be an address such as http://127.0.0.1:4318 or "
            f"grpc://127.0.0.1:4317, got {endpoint!r}.",
            param="otlp_traces_endpoint",
        )
    bare = parts.scheme != "grpc" and parts.path in ("", "/")
    return parts._replace(path=_PATH).geturl() if bare else endpoint


def _exporter_class(scheme: str) -> Any:
    try:
        import opentelemetry.sdk.trace  # noqa: F401 - whether it's there

        if scheme == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

            return grpc_exporter.OTLPSpanExporter
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

        return http_exporter.OTLPSpanExporter
    except ImportError as error:
        extra = "opentelemetry-exporter-otlp-proto-grpc" if scheme == "grpc" else "'quire[otel]'"
        raise ConfigError(
            f"Traces need a package that isn't installed ({error.name}): pip install {extra}.",
            param="otlp_traces_endpoint",
        ) from None


class Tracing:
    """Spans of this process, sent in batches by OpenTelemetry's thread.

    Args:
        endpoint: destination, see `check_endpoint`.
        service: the `service.name`, unless OTEL_SERVICE_NAME sets another.
        instance: the `service.instance.id`.

    OpenTelemetry's own variables apply, too: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...
    Raises `ConfigError` for an invalid address, and without the extra's packages.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        endpoint = check_endpoint(endpoint)
        scheme = urlsplit(endpoint).scheme
        exporter = _exporter_class(scheme)(
            endpoint=endpoint.replace("grpc://", "http://", 1),
            **({"insecure": True} if scheme == "grpc" else {}),
        )
        self._provider = _provider(service, instance, exporter)
        self.tracer: Tracer = self._provider.get_tracer("quire")

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most, and stop."""
        self._provider.force_flush(5000)
        self._provider.shutdown()


def _provider(service: str, instance: str, exporter: Any) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME") or service
    resource = Resource.create({"service.name": name, "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def context_of(headers: Mapping[str, str]) -> Any:
    """The context of `traceparent` and `tracestate`; empty without them."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers, context=Context())


def headers_of(span: Span) -> dict[str, str]:
    """`traceparent`, and `tracestate` if there is one, that name this span as the parent."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span))
    return carrier
