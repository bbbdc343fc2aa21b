"""What each of fifteen thousand tests would pay for, and hardly one has anything of."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from _pytest.logging import catching_logs

#: Most tests are here, and have nothing to do with Django.
WITHOUT_DJANGO = ("tests/kernels/", "tests/engine/")
#: Fixtures of every test that act for what stands behind them alone: a marker,
FOR_A_MARKER = {
    "_django_set_urlconf": "urls",
    "_django_isolate_apps": "django_isolate_apps",
    "_template_string_if_invalid_marker": "ignore_template_errors",
}
#: classes of unittest and an app that we haven't.
FOR_NOTHING = {"_django_setup_unittest", "_django_clear_site_cache"}
#: What a test needs that asks Django for something.
FOR_DJANGO = {
    *("_cheap_and_alone", "_dj_autoclear_mailbox", "_django_db_marker", "django_test_environment"),
    *("_fail_for_invalid_template_variable", "_static_files_are_found_once"),
    "_tables_may_be_emptied",
}
#: They keep what they are told from the root's handlers, so that pytest hangs its own two onto each
#: of some forty, and takes them off again, three times a test.
ALOOF = ("torch.", "torch", "strobelight_", "c10d-")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Without fixtures that would be set up for nothing. One that another names is set up still."""
    if isinstance(item, pytest.Function):
        idle = _idle(item)
        item.fixturenames[:] = [name for name in item.fixturenames if name not in idle]


def _idle(item: pytest.Function) -> set[str]:
    idle = {name for name, mark in FOR_A_MARKER.items() if item.get_closest_marker(mark) is None}
    idle |= FOR_NOTHING
    if "live_server" not in item.fixturenames:
        idle.add("_live_server_helper")
    if item.nodeid.startswith(WITHOUT_DJANGO) and item.get_closest_marker("django_db") is None:
        idle |= FOR_DJANGO
    return idle


def let_loggers_tell_the_root() -> None:
    """What other people's loggers are told reaches pytest's handlers through the root's."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith(ALOOF):
            logger.propagate = True


def find_aloof_loggers_quickly() -> None:
    """pytest looks at each of some seven hundred loggers, six times a test, for those that its
    handlers have to be hung onto. Here it's one look at a flag of each.
    """
    # What stands for a logger that isn't there yet has no such flag.
    logging.PlaceHolder.propagate = True  # type: ignore[attr-defined]
    plain = catching_logs.__enter__

    def enter(self: Any) -> logging.Handler:
        if self.level is not None:
            handler: logging.Handler = plain(self)
            return handler
        known = logging.root.manager.loggerDict.values()
        aloof = [each for each in known if not each.propagate]  # type: ignore[union-attr]
        self.attached_loggers += [logging.root, *aloof]
        for logger in self.attached_loggers:
            logger.addHandler(self.handler)
        return self.handler  # type: ignore[no-any-return]

    catching_logs.__enter__ = enter  # type: ignore[assignment,method-assign]
