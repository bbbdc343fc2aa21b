"""Logging of the engine: one line a record (`LEVEL MM-DD HH:MM:SS file:line] text`), or JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from engine.contract.logging_config import apply_logging_config


class LineFormatter(logging.Formatter):
    """vLLM's line format. Line breaks in a message are escaped, so that nobody can forge a line."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s", "%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's line; a traceback, if any, follows on lines of its own."""
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the gateways' keys: at, level, logger, message, exception; of a
    gateway's access line its fields as well.
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
        entry |= getattr(record, "access", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(level: str = "info") -> None:
    """Log to standard error, as JSON where `QUIRE_LOG_STYLE` is `json`.

    The file that `QUIRE_LOGGING_CONFIG` names replaces all of it. Raises `ConfigError` where it
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
