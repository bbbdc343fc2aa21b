"""`--processes N`: run the tests in N processes, each of which takes a group of them at a time.

They are forked from the process that collected. pytest-xdist's workers, which start from nothing,
each spend half a minute of a core on importing and collecting the same anew.
"""

from __future__ import annotations

import pytest

from tests.sharing.foreman import Foreman


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option."""
    parser.addoption(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="Run the tests in N processes, forked when all tests are collected.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In place of pytest's own loop, where there's something to share out."""
    options = session.config.option
    unfit = session.testsfailed and not options.continue_on_collection_errors
    if options.processes < 2 or options.collectonly or unfit or options.usepdb:
        return None
    Foreman(session, options.processes).run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True
