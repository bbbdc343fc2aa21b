"""Scales of fp8 KV caches that several ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.models import make_model
from tests.engine.ranks.test_tensor_parallel import outputs, running

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]


def write_scales(folder: Path) -> None:
    """Of three layers with two heads of keys and values each."""
    weights = load_file(folder / "model.safetensors")
    for layer in range(3):
        for part, scale in (("k", 0.01), ("v", 0.02)):
            name = f"model.layers.{layer}.self_attn.{part}_scale"
            weights[name] = torch.tensor([scale, 10 * scale]) * (layer + 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


_STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("size", "options", "measured"),
    [(2, {}, False), (1, _STAGES, False), (1, _STAGES, True)],
)
def test_ranks_give_the_bits_of_one(
    size: int, options: dict[str, Any], measured: bool, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path)
    if not measured:
        write_scales(folder)
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "calculate_kv_scales": measured}
    with running(folder, 1, **settings) as llm:
        expected = outputs(llm)
    with running(folder, size, **settings, **options) as llm:
        assert outputs(llm) == expected
