"""Stands in for vLLM's `tests/conftest.py`; puts the stand-in of the package in its place first."""

from __future__ import annotations

import pytest
import vllm  # noqa: F401


@pytest.fixture(scope="session")
def hf_runner() -> None:
    """Runs the file's own model with transformers, to compare with."""
    pytest.skip("needs the weights of the model that the file names")


vllm_runner = hf_runner
