"""Which worker runs what, and what begins first: a run takes as long as its longest worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

#: Folders whose files share a browser or a running product, which one worker starts.
TOGETHER = ("tests/console/browser/", "tests/e2e/")
#: Files in them that have a product of their own.
ALONE = ("tests/e2e/test_chaos.py", "tests/e2e/test_poison.py")
#: Files of the browser before a product with an engine; the others need none, and would only wait.
BEFORE_AN_ENGINE = tuple(
    f"tests/console/browser/test_{name}.py"
    for name in ("every_page", "identity", "inside", "live_pages", "real_socket")
)
#: What takes a minute and more, longest first; all else follows as it was collected.
FIRST = (
    *("tests/console/browser/", "tests/e2e/", ALONE[0], "tests/features/"),
    *("tests/engine/gguf/test_running.py", "tests/platform/test_postgresql.py"),
    *("tests/platform/test_up.py", ALONE[1], "tests/kernels/triton/"),
)
#: Tests that compute; the others wait as long for a process, a database or a period.
COMPUTING = ("tests/demo/", "tests/engine/", "tests/kernels/")


def group_of(path: str) -> str:
    """The folder or file that a file's tests are shared out with."""
    if path in ALONE:
        return path
    if path in BEFORE_AN_ENGINE:
        return "tests/console/browser/ before an engine"
    return next((folder for folder in TOGETHER if path.startswith(folder)), path)


def place_of(path: str) -> int:
    """How early a file begins."""
    group = group_of(path)
    places = [place for place, name in enumerate(FIRST) if group.startswith(name)]
    return max(places, default=len(FIRST))


def mixed(paths: Sequence[str]) -> dict[str, tuple[int, float]]:
    """The place of each file: `place_of` it, and of two in one place how far it is among its kind.

    So what computes and what waits are spread over the whole run: a processor that one worker
    leaves idle is another's.
    """
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for path in dict.fromkeys(paths):
        kinds[path.startswith(COMPUTING)].append(path)
    return {
        path: (place_of(path), number / len(kind))
        for kind in kinds.values()
        for number, path in enumerate(kind)
    }


class Together(LoadFileScheduling):
    """File by file, but folders that share something whole."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._numbers: dict[WorkerController, dict[str, int]] = {}
        self._done = 0

    def _split_scope(self, nodeid: str) -> str:
        return group_of(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: WorkerController) -> None:
        """As it is, but without a search through all tests for each one."""
        scope, unit = self.workqueue.popitem(last=False)
        given = self.assigned_work.setdefault(node, {})
        # What is done counts no more: at each test's end all that is here is counted.
        for name in [name for name, tests in given.items() if all(tests.values())]:
            del given[name]
        given[scope] = unit
        if node not in self._numbers:
            collected = self.registered_collections[node]
            self._numbers[node] = {name: number for number, name in enumerate(collected)}
        numbers = self._numbers[node]
        node.send_runtest_some([numbers[name] for name, done in unit.items() if not done])

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more once it has done all but what stands behind its last file."""
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            if node.shutting_down:
                return
            self._assign_work_unit(node)
        if not self.workqueue:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """What a worker died of isn't begun again by the next: it's run once more when all is."""
        for unit in self.assigned_work[node].values():
            for name in (name for name, done in unit.items() if not done):
                died = name.removesuffix("::")  # a file, if it's what stands behind one
                unit.update({each: True for each in (died, f"{died}::") if each in unit})
                super().remove_node(node)
                return died
        return super().remove_node(node)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """As it is. How far a run has come is told by files, for nobody knows of all tests."""
        super().mark_test_complete(node, item_index, duration)
        self._done += 1
        plugins = self.config.pluginmanager
        reporter, session = plugins.get_plugin("terminalreporter"), plugins.get_plugin("session")
        if reporter is not None and self.collection is not None:
            part = self._done / len(self.collection)
            session.testscollected = max(1, round(reporter.reported_progress / part))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """In place of `--dist loadfile`."""
    return Together(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups first: nobody waits for one that began last. Then a mix."""
    paths = [item.nodeid.split("::", 1)[0] for item in items]
    places = mixed(paths)
    placed = sorted(zip(paths, items, strict=True), key=lambda pair: places[pair[0]])
    items[:] = [item for _, item in placed]
