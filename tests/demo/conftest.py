"""What the demo model's tests share."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import demo


@pytest.fixture(scope="session")
def shipped() -> Path:
    """The folder of the model as it ships."""
    return Path(demo.__file__).parent / "model"


@pytest.fixture(scope="session")
def adapters() -> Path:
    """The folder of its adapters."""
    return Path(demo.__file__).parent / "adapters"


@pytest.fixture(scope="session")
def tokenizer(shipped: Path) -> PreTrainedTokenizerFast:
    """The shipped tokenizer."""
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(shipped))
