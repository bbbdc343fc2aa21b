"""What the two ends of a worker's socket say: a line of JSON each."""

from __future__ import annotations

import json
import socket
import warnings
from typing import Any

import pytest

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One line. What JSON doesn't know, such as a property that a test notes, goes as text."""
    return json.dumps(message, default=str).encode() + b"\n"


class Lines:
    """Whole lines of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._rest = end, b""

    def read(self) -> list[Message] | None:
        """What came, once something did; None when the other end is gone."""
        try:
            data = self._end.recv(1 << 16)
        except ConnectionResetError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def report_of(config: pytest.Config, data: Message) -> pytest.TestReport:
    """The report that `pytest_report_to_serializable` made `data` of. JSON has no tuples: a skip's
    place and reason is one, and where a test stands.
    """
    if isinstance(data["longrepr"], list):
        data["longrepr"] = tuple(data["longrepr"])
    data["location"] = tuple(data["location"])
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(
        config=config, data=data
    )
    return report


def warning_data(found: warnings.WarningMessage) -> Message:
    """What is shown of a warning."""
    return {
        "message": str(found.message),
        "category": found.category.__name__,
        "filename": found.filename,
        "lineno": found.lineno,
    }


def warning_of(data: Message) -> warnings.WarningMessage:
    """A warning that reads as the one that `data` is of."""
    category = type(data["category"], (Warning,), {})
    message = category(data["message"])
    return warnings.WarningMessage(message, category, data["filename"], data["lineno"])
