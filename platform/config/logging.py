"""Logging: a record is always one line, whatever text a client managed to put into it."""

import logging
import re
import time
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from structlog.processors import JSONRenderer, format_exc_info
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor

from common.log_context import add_request
from common.redaction import without_tokens
from engine.contract.errors import ConfigError
from engine.contract.observability import apply_logging_config, logging_config

# C0 and C1 controls, line and paragraph separators, and the marks that reorder or hide text.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
MAX_CHARS = 16_384


def escape_control_chars(text: str) -> str:
    """Return the text with control characters escaped, tokens removed, and its length bounded."""
    text = without_tokens(text)
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def _build_entry(_: object, __: str, event: EventDict) -> EventDict:
    """Return a line's fields in order, each of them safe to write.

    The fields of an access line (`quire.access`) are attributes of its record.
    """
    record: logging.LogRecord = event.pop("_record")
    del event["_from_structlog"]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    message, exception = event.pop("event"), event.pop("exception", None)
    entry = {
        "at": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname,
        "logger": record.name,
    }
    fields = {"message": message, **event, **getattr(record, "access", {})}
    for name, value in fields.items():
        entry[name] = escape_control_chars(value) if isinstance(value, str) else value
    if exception is not None:
        entry["exception"] = without_tokens(exception)[-MAX_CHARS:]
    return entry


#: Request details that a line for people shows after its message.
REQUEST_FIELDS = ("request_id", "tenant", "model")


def _render_line(_: object, __: str, entry: EventDict) -> str:
    """`2026-01-31T12:00:00.000Z INFO logger: message [request_id=...]`, always a single line."""
    line, exception = _render_text(entry), entry.get("exception")
    return f"{line}\\n{escape_control_chars(exception)}" if exception else line


def _render_debug(_: object, __: str, entry: EventDict) -> str:
    """Formatter for people at a terminal with QUIRE_DEBUG: tracebacks span several lines."""
    line, exception = _render_text(entry), entry.get("exception")
    return f"{line}\n{exception}" if exception else line


def _render_text(entry: EventDict) -> str:
    request = " ".join(f"{name}={entry[name]}" for name in REQUEST_FIELDS if entry.get(name))
    text = f"{entry['at']} {entry['level']} {entry['logger']}: {entry['message']}"
    return f"{text} [{request}]" if request else text


RENDERERS: dict[str, Processor] = {
    "line": _render_line,
    "json": JSONRenderer(),
    "debug": _render_debug,
}


def build_formatter(style: str) -> logging.Formatter:
    """Return a formatter of the given style ("line", "json" or "debug")."""
    return ProcessorFormatter(
        foreign_pre_chain=[add_request, format_exc_info],
        processors=[_build_entry, RENDERERS[style]],
    )


class WithoutTraceback(logging.Filter):
    """Keeps a record's message and drops its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        return True


class SettingNameFilter(logging.Filter):
    """Replaces the name of Django's setting in messages with the name of Quire's variable."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = re.sub(r"\bALLOWED_HOSTS\b", "QUIRE_ALLOWED_HOSTS", str(record.msg))
        return True


def build_logging(level: str, style: str) -> dict[str, Any]:
    """Return `LOGGING`: that of `QUIRE_LOGGING_CONFIG`, or ours. Raises `ImproperlyConfigured`."""
    try:
        apply_logging_config()
        return logging_config() or logging_settings(level, style)
    except ConfigError as error:
        raise ImproperlyConfigured(error.message) from None


def logging_settings(level: str, style: str) -> dict[str, Any]:
    """Return `LOGGING` for a level ("INFO") and a style ("line", "json" or "debug")."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {
            "without_traceback": {"()": WithoutTraceback},
            "our_variables": {"()": SettingNameFilter},
        },
        "formatters": {"quire": {"()": build_formatter, "style": style}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "quire"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            # Would log each failed request a second time; the view's own logger says more.
            "django.request": {"level": "ERROR"},
            # Any scanner can cause these, and their traceback says nothing useful.
            "django.security.DisallowedHost": {"filters": ["without_traceback", "our_variables"]},
            "django.server": {"handlers": ["stderr"], "level": level, "propagate": False},
            "daphne": {"level": "WARNING"},
            # They log full URLs, including secrets in those of tool servers and hubs.
            "azure": {"level": "WARNING"},
            "httpx": {"level": "WARNING"},
            "httpx2": {"level": "WARNING"},
            # One record per request: useful to collectors, but it would flood a terminal.
            "quire.access": {"level": level if style == "json" else "WARNING"},
            "uvicorn": {"level": "WARNING"},
        },
    }
