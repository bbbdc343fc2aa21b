"""A plug-in of pytest's: of a test with many cases the first and the last.

For what has run with all of them on SQLite. Most cases of those are bad input, which no database
sees.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

MANY = 4


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the others out."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    inner = {item for cases in tests.values() if len(cases) >= MANY for item in cases[1:-1]}
    config.hook.pytest_deselected(items=[item for item in items if item in inner])
    items[:] = [item for item in items if item not in inner]
