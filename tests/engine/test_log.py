"""What the engine's log looks like to people and to collectors."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from engine.serving.log import configure_logging


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def formatted(root: logging.Logger, message: str, error: bool = False) -> str:
    configure_logging("info")
    try:
        raise ValueError("the reason") if error else LookupError
    except (ValueError, LookupError):
        trouble = sys.exc_info() if error else None
    record = logging.LogRecord("engine.x", logging.WARNING, "f.py", 7, message, (), trouble)
    return root.handlers[0].format(record)


def test_a_line_is_one_line(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_LOG_STYLE", raising=False)
    line = formatted(root, "two\nlines")
    assert line.startswith("WARNING ")
    assert line.endswith("f.py:7] two\\nlines")


def test_json_has_the_gateways_keys(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_STYLE", "json")
    line = formatted(root, "two\nlines", error=True)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.keys() == {"at", "level", "logger", "message", "exception"}
    assert entry["message"] == "two\nlines"
    assert entry["exception"].endswith("ValueError: the reason")
