"""What the engine's log looks like to people and to collectors."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.contract.errors import ConfigError
from engine.contract.observability import configure_logging


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


def test_an_access_line_keeps_its_fields(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_STYLE", "json")
    configure_logging("info")
    record = logging.LogRecord("quire.access", logging.INFO, "f.py", 7, "GET /", (), None)
    record.access = {"status": 200, "tenant": "a\n\u202eb", "trace_id": "0f"}
    line = root.handlers[0].format(record)
    assert line.isascii()
    assert json.loads(line).items() >= record.access.items()


def test_a_file_of_settings_replaces_ours(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, log = tmp_path / "logging.json", tmp_path / "engine.log"
    handlers = {"file": {"class": "logging.FileHandler", "filename": str(log)}}
    config = {"version": 1, "disable_existing_loggers": False, "handlers": handlers}
    file.write_text(json.dumps(config | {"root": {"handlers": ["file"], "level": "ERROR"}}))
    monkeypatch.setenv("QUIRE_LOGGING_CONFIG", str(file))
    configure_logging("info")
    logging.getLogger("engine.x").warning("below it")
    logging.getLogger("engine.x").error("above it")
    assert log.read_text() == "above it\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "can't be read"),
        ("{", "isn't JSON"),
        ("[]", "JSON object"),
        ('{"version": 2}', "version"),
        ('{"version": 1, "handlers": {"x": {"class": "no.Such"}}}', "'x'"),
    ],
)
def test_a_file_that_says_nothing_usable_is_refused_by_name(
    root: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str | None,
    problem: str,
) -> None:
    file = tmp_path / "logging.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("QUIRE_LOGGING_CONFIG", str(file))
    with pytest.raises(ConfigError, match="QUIRE_LOGGING_CONFIG") as refused:
        configure_logging("info")
    assert problem in refused.value.message
