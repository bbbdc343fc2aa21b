"""Tests are set up with what they use."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.light import FOR_A_MARKER, FOR_DJANGO, FOR_NOTHING, let_loggers_tell_the_root


def test_nothing_is_set_up_for_nothing(request: pytest.FixtureRequest) -> None:
    names = {*request.node.fixturenames}
    assert names.isdisjoint({*FOR_A_MARKER, *FOR_NOTHING, "_live_server_helper"})
    assert names >= FOR_DJANGO


@pytest.mark.urls("config.urls")
def test_a_marker_is_heeded(request: pytest.FixtureRequest) -> None:
    assert "_django_set_urlconf" in request.node.fixturenames


@pytest.fixture
def patching(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


@pytest.mark.parametrize("case", [0, 1])
def test_what_a_fixture_names_is_set_up(
    request: pytest.FixtureRequest, patching: pytest.MonkeyPatch, case: int
) -> None:
    assert patching is request.node.funcargs["monkeypatch"]
    assert request.node.funcargs["case"] == case


def test_what_an_aloof_logger_is_told_is_caught_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.of_this_test")
    logger.propagate = False
    let_loggers_tell_the_root()
    logger.warning("seen")
    assert caplog.messages == ["seen"]


@pytest.fixture
def aloof() -> Iterator[logging.Logger]:
    """A logger that keeps to itself, behind one that isn't there."""
    logger = logging.getLogger("nobody.keeps_to_himself")
    assert isinstance(logging.root.manager.loggerDict["nobody"], logging.PlaceHolder)
    logger.propagate = False
    yield logger
    logger.propagate = True


def test_what_a_logger_keeps_to_itself_is_caught(
    aloof: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    aloof.warning("seen")
    assert caplog.messages == ["seen"]
    assert caplog.handler in aloof.handlers


def test_and_no_handler_stays_with_it() -> None:
    assert not logging.getLogger("nobody.keeps_to_himself").handlers
