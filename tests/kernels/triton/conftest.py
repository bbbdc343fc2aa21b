"""Kernels run in Triton's interpreter here."""

import pytest

import kernels
from tests.interpreter import quicken

quicken()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models run on Triton's kernels, on a CPU too."""
    monkeypatch.setenv(kernels.FORCED, "triton")
