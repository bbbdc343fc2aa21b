"""Stands in for vLLM's `tests/conftest.py`; puts the stand-in of the package in its place first."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import vllm


@pytest.fixture(scope="session", autouse=True)
def tokenizers_of_the_served_model() -> None:
    """What a test takes from transformers by its model's name is the served model's."""
    if "transformers" not in sys.modules:
        return
    from transformers import AutoTokenizer

    baseline = AutoTokenizer.from_pretrained

    def from_pretrained(name: str, *args: Any, **options: Any) -> Any:
        return baseline(name if os.path.isdir(name) else vllm.MODEL, *args, **options)

    AutoTokenizer.from_pretrained = from_pretrained


@pytest.fixture(scope="session")
def hf_runner() -> None:
    """Runs the file's own model with transformers, to compare with."""
    pytest.skip("needs the weights of the model that the file names")


vllm_runner = hf_runner
