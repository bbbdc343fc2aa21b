"""Small models that see, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.multimodal.models import FAMILIES


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    """Name -> folder, which stays as it is, model and processor."""
    families: dict[str, tuple[Path, Any, Any]] = {}

    def get(name: str) -> tuple[Path, Any, Any]:
        if name not in families:
            folder = tmp_path_factory.mktemp(name)
            families[name] = (folder, *FAMILIES[name](folder))
        return families[name]

    return get
