"""Engines over a table of families, formats of weights and KV cache dtypes, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.survey.run import make
from tests.engine.families.conftest import NATIVE
from tests.engine.gguf.files import Kind, everywhere, write_gguf
from tests.engine.models import make_model

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-unrounded": {"dtype": "bfloat16", "round_activations": False},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
GGUF = ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "BF16"]
CACHES = ["float32", "bfloat16", "float16", "int8"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Recipe of a family -> the folder of its checkpoint."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make(NATIVE[name], tmp_path_factory.mktemp(name) / "made")[1]
        return made[name]

    return get


@pytest.fixture
def engine(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LLM]:
    """An engine with so few blocks that neighbours preempt each other."""

    monkeypatch.setattr("engine.models.gguf.folder.cache_dir", lambda: tmp_path / "cache")

    def get(family: str, weights: str, cache: str, **settings: Any) -> LLM:
        if weights in FORMATS:
            folder = checkpoint(family)
            settings = {**FORMATS[weights], **settings}
        else:
            # As wide as a block of the K types.
            made = make_model(family, tmp_path / "made", hidden_size=256, intermediate_size=256)
            folder = write_gguf(made, tmp_path / "model.gguf", everywhere(Kind[weights]))
        defaults = {"max_model_len": 256, "num_gpu_blocks_override": 64, "num_threads": 1}
        return LLM(str(folder), kv_cache_dtype=cache, **{**defaults, "block_size": 16, **settings})

    return get
