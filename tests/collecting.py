"""Each worker of a run collects the files that it runs, when it runs them.

Left alone, each would collect all fifteen thousand tests, and in a fresh checkout each would
compile all files, too.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests import light

#: Whether files are found only, and not yet looked into.
FINDING = pytest.StashKey[bool]()
#: The test that ran last.
LAST = pytest.StashKey[pytest.Item]()
#: What `--durations` leaves out.
SHORT_S = 0.005


#: The modules that were there when `keep_imports` last did something.
kept = 0


def keep_imports(more: int) -> None:
    """What was imported is looked through no more, once it's `more` modules than the last time."""
    global kept
    if len(sys.modules) >= kept + more:
        gc.collect()
        gc.freeze()
        light.let_loggers_tell_the_root()
        kept = len(sys.modules)


class WholeFile(pytest.Item):
    """A file among what is shared out. To run it is to collect and to run its tests."""

    def __init__(self, *, module: pytest.Module, **known: Any) -> None:
        super().__init__(**known)
        self.module = module
        self.add_marker(pytest.mark.timeout(0))  # each of its tests has its own
        # A worker's database is made for what is marked when its first test asks for one.
        self.add_marker(pytest.mark.django_db)

    def runtest(self) -> None:
        """Nothing: its tests have run, each for itself."""

    def run_tests(self, nextitem: pytest.Item | None) -> None:
        """Collect them, choose as the whole run does, and run them."""
        session, hook = self.session, self.config.hook
        place = session.items.index(self)
        items = list(session.genitems(self.module))
        session._collection_cache.clear()  # or it would keep them
        keep_imports(20)  # now, when no engine of an earlier file is there that would stay, too
        hook.pytest_collection_modifyitems(session=session, config=self.config, items=items)
        for item, following in zip(items, [*items[1:], nextitem], strict=False):
            # What a worker tells is about the item in its place.
            session.items[place] = session.stash[LAST] = item
            hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = self


class Behind(pytest.Item):
    """What stands behind a file: to run it is to take down what no test needs any more.

    A worker begins what it knows the next item of. Were that another file, then what a worker runs
    next would be settled when it begins a file, not when it has done it.
    """

    def __init__(self, *, file: WholeFile, **known: Any) -> None:
        super().__init__(**known)
        self.file = file

    def runtest(self) -> None:
        """Nothing: it's no test."""

    def take_down(self, nextitem: pytest.Item | None) -> None:
        """Take down what tests have left and `nextitem` doesn't need."""
        session = self.session
        place = session.items.index(self)
        for report in runtestprotocol(self.file, log=False, nextitem=nextitem):
            if report.failed:  # which is the last test's, and with that test it's run once more
                session.items[place] = test = session.stash[LAST]
                of_test = pytest.TestReport(
                    *(test.nodeid, test.location, {}, report.outcome, report.longrepr, report.when),
                    sections=report.sections,
                )
                self.ihook.pytest_runtest_logreport(report=of_test)
        session.items[place] = self


def file_by_file(config: pytest.Config) -> bool:
    """Whether this is a worker, and no test is chosen by what only its file tells."""
    single = any("::" in each for each in config.args)
    named = single or config.getoption("keyword") or config.getoption("lf", False)
    usual = config.getoption("markexpr") in ("", *config.getini("addopts"))
    return hasattr(config, "workerinput") and usual and not named


def pytest_collection(session: pytest.Session) -> None:
    """Files are found first."""
    session.config.stash[FINDING] = file_by_file(session.config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """From now on they are looked into."""
    session.config.stash[FINDING] = False


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """In place of a file's tests, the file and what stands behind it."""
    if not isinstance(collector, pytest.Module) or not collector.config.stash.get(FINDING, False):
        return None
    name, nodeid, folder = collector.name, collector.nodeid, collector.parent
    file = WholeFile.from_parent(folder, name=name, nodeid=nodeid, module=collector)
    behind = Behind.from_parent(folder, name=name, nodeid=f"{nodeid}::", file=file)
    return pytest.CollectReport(nodeid, "passed", None, [file, behind])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """What is no test isn't set up, called and reported as one."""
    if isinstance(item, WholeFile):
        item.run_tests(nextitem)
    elif isinstance(item, Behind):
        item.take_down(nextitem)
    elif hasattr(item.config, "workerinput"):
        run_and_tell(item, nextitem)
    else:
        return None
    return True


def run_and_tell(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test as pytest does. That it was set up and taken down, nobody needs to know of most:
    to tell and to hear something takes as long as a small test.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        told = report.when == "call" or not report.passed or report.sections
        if told or report.duration >= SHORT_S:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
