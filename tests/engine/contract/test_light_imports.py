"""A module is imported as if another weren't installed, which it still is for all others."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from engine.system.light_imports import import_blocking

HEAVY, USER = "heavy_one", "user_of_it"


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{HEAVY}.py").touch()
    (tmp_path / f"{USER}.py").write_text(
        f"try:\n    import {HEAVY} as found\nexcept ImportError:\n    found = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in (HEAVY, USER):
        sys.modules.pop(name, None)


def test_a_module_does_without_what_others_still_find() -> None:
    import_blocking(USER, HEAVY)
    assert sys.modules[USER].found is None
    assert import_module(HEAVY).__name__ == HEAVY


def test_what_is_loaded_already_stays() -> None:
    heavy = import_module(HEAVY)
    import_blocking(USER, HEAVY)
    assert import_module(USER).found is heavy
    assert sys.modules[HEAVY] is heavy


def test_a_module_that_fails_leaves_the_other_to_be_found(tmp_path: Path) -> None:
    (tmp_path / f"{USER}.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_blocking(USER, HEAVY)
    assert HEAVY not in sys.modules
