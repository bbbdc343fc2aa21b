"""Tests that need a CUDA device: `python -m pytest -m gpu --confcutdir tests/gpu tests/gpu`.

They need torch, Triton, transformers, tokenizers, msgspec, jinja2 and tqdm; neither Django nor
Redis.
"""

from __future__ import annotations

import os

import pytest
import torch

#: "cpu" runs the kernels' tests in Triton's interpreter (TRITON_INTERPRET=1): to test the tests.
DEVICE = os.environ.get("QUIRE_GPU_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are marked; without a device they are skipped, and say so."""
    missing = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture
def device() -> str:
    """Where the tests run."""
    return DEVICE


@pytest.fixture
def large() -> bool:
    """Whether real shapes can be afforded."""
    return DEVICE == "cuda"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Fresh inputs for each test, the same in each run."""
    torch.manual_seed(1234)
