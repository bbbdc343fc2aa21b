"""The playground doesn't call a failure of the server what is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import inference.urls  # noqa: F401  every endpoint, and with it every error
from engine.contract.errors import QuireError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "platform/console/static/console/js/playground/errors.js"
TITLED = set(re.findall(r"^  (\w+): \"", SCRIPT.read_text(encoding="utf-8"), re.M))


def _errors(of: type[QuireError] = QuireError) -> Iterator[type[QuireError]]:
    for error in of.__subclasses__():
        yield error
        yield from _errors(error)


@pytest.mark.parametrize("code", ["engine_paused", "engine_sleeping", "overloaded"])
def test_what_an_operator_did_and_what_is_busy_have_titles(code: str) -> None:
    assert any(error.code == code for error in _errors())
    assert code in TITLED


def test_no_refusal_is_called_a_failure_of_the_server() -> None:
    refusals = {error for error in _errors() if error.status < 500}
    assert "insufficient_quota" in {error.code for error in refusals}
    untitled = {error.__name__ for error in refusals if not {error.code, error.error_type} & TITLED}
    assert untitled == set()
