"""Logging of the engine: one line a record (`LEVEL MM-DD HH:MM:SS file:line] text`)."""

from __future__ import annotations

import logging
import sys


class LineFormatter(logging.Formatter):
    """vLLM's line format. Line breaks in a message are escaped, so that nobody can forge a line."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s", "%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's line; a traceback, if any, follows on lines of its own."""
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


def configure_logging(level: str = "info") -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
