"""Tiny pooling models, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pooling.models import make

Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def pooling_model(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """(kind, head, **changes) -> folder of its random checkpoint; not to be changed."""
    folders: dict[str, Path] = {}

    def get(kind: str, head: str = "Model", **changes: Any) -> Path:
        key = f"{kind} {head} {changes}"
        if key not in folders:
            folders[key] = make(kind, tmp_path_factory.mktemp(kind), head, **changes)
        return folders[key]

    return get
