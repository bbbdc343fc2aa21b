"""Logging: one line a record, whatever a client managed to get into it."""

import json
import logging
import re
import time
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from common.redaction import without_tokens
from engine.contract.errors import ConfigError
from engine.contract.observability import apply_logging_config, logging_config

# C0 and C1 controls, line and paragraph separators, and the marks that reorder or hide text.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
MAX_CHARS = 16_384


def escape_control_chars(text: str) -> str:
    """The text with control characters written as escapes, without tokens, of a bounded length."""
    text = without_tokens(text)
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO logger: message`, always a single line."""

    def __init__(self) -> None:
        super().__init__("{asctime} {levelname} {name}: {message}", style="{")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{stamp}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(super().format(record))


class JsonFormatter(LineFormatter):
    """JSON lines, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "at": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": escape_control_chars(record.getMessage()),
        }
        # Lines of `quire.access` bring their fields.
        entry |= {name: _clean(value) for name, value in getattr(record, "access", {}).items()}
        if record.exc_info:
            entry["exception"] = without_tokens(self.formatException(record.exc_info))[-MAX_CHARS:]
        return json.dumps(entry)


def _clean(value: Any) -> Any:
    return escape_control_chars(value) if isinstance(value, str) else value


class DebugFormatter(LineFormatter):
    """Lines for a terminal with QUIRE_DEBUG: tracebacks keep their lines."""

    def format(self, record: logging.LogRecord) -> str:
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        record.exc_info, record.exc_text = None, None
        line = super().format(record)
        return f"{line}\n{without_tokens(traceback)}" if traceback else line


class WithoutTraceback(logging.Filter):
    """Leaves a record's message and drops its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        return True


class SettingNameFilter(logging.Filter):
    """Names our variable where Django names its own setting."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = re.sub(r"\bALLOWED_HOSTS\b", "QUIRE_ALLOWED_HOSTS", str(record.msg))
        return True


def build_logging(level: str, style: str) -> dict[str, Any]:
    """`LOGGING`: what `QUIRE_LOGGING_CONFIG` says, or ours. Raises `ImproperlyConfigured`."""
    try:
        apply_logging_config()
        return logging_config() or logging_settings(level, style)
    except ConfigError as error:
        raise ImproperlyConfigured(error.message) from None


def logging_settings(level: str, style: str) -> dict[str, Any]:
    """`LOGGING` for a level ("INFO") and a style ("line", "json" or "debug")."""
    formatter = {"line": LineFormatter, "json": JsonFormatter, "debug": DebugFormatter}[style]
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {
            "without_traceback": {"()": WithoutTraceback},
            "our_variables": {"()": SettingNameFilter},
        },
        "formatters": {"quire": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "quire"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            # Each failing request would be told twice: the view's own logger says more.
            "django.request": {"level": "ERROR"},
            # Any scanner can make one of these; where in Django it was noticed tells nothing.
            "django.security.DisallowedHost": {"filters": ["without_traceback", "our_variables"]},
            "django.server": {"handlers": ["stderr"], "level": level, "propagate": False},
            "daphne": {"level": "WARNING"},
            "httpx": {"level": "WARNING"},
            # One record a request: for collectors; at a terminal they would hide all else.
            "quire.access": {"level": level if style == "json" else "WARNING"},
            "uvicorn": {"level": "WARNING"},
        },
    }
