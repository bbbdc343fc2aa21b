"""Engines over a table of families, formats of weights and KV cache dtypes, made once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from tests.engine.checkpoints.folders import make_mxfp4, make_pair
from tests.engine.checkpoints.packages import bitsandbytes4, compressed, scheme
from tests.engine.checkpoints.writers import Writer, fp8, gptq, nvfp4
from tests.engine.families.conftest import NATIVE
from tests.engine.gguf.files import Kind, write_gguf
from tests.engine.models import make_model
from tests.survey.run import make

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-unrounded": {"dtype": "bfloat16", "round_activations": False},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
_ROWS8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
#: Checkpoints that stay as they are in memory.
CONVERTED: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq, act order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        gptq(sorted_=True, symmetric=False),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        fp8("block", "weight_scale_inv"),
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes4("nf4", False)),
    "w8a8": (
        {**scheme(**_ROWS8), "format": "int-quantized"},
        compressed("int-quantized", **_ROWS8),
    ),
}
#: Kinds of a file's layers in turn.
GGUF = [Kind[name] for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "BF16", "Q5_1", "Q5_K")]
CACHES = ["float32", "bfloat16", "float16", "int8", "fp8"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Recipe of a family -> the folder of its checkpoint."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = make(NATIVE[name], tmp_path_factory.mktemp(name) / "made")[1]
        return folders[name]

    return get


@pytest.fixture
def engine(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LLM]:
    """An engine with so few blocks that neighbours preempt each other."""

    monkeypatch.setattr("engine.checkpoints.gguf.folder.cache_dir", lambda: tmp_path / "cache")

    def get(family: str, weights: str, cache: str, **settings: Any) -> LLM:
        folder = checkpoint(family)
        if weights == "gguf":
            # As wide as a block of the K types.
            model = make_model(family, tmp_path / "made", hidden_size=256, intermediate_size=256)
            kinds = itertools.cycle(GGUF)
            folder = write_gguf(model, tmp_path / "model.gguf", lambda name: next(kinds))
        elif weights == "mxfp4":
            folder = make_mxfp4(folder, tmp_path).packed
        elif weights in CONVERTED:
            folder = make_pair(folder, tmp_path / "made", *CONVERTED[weights]).packed
        else:
            settings = {**FORMATS[weights], **settings}
        defaults = {"max_model_len": 256, "num_gpu_blocks_override": 64, "num_threads": 1}
        return LLM(str(folder), kv_cache_dtype=cache, **{**defaults, "block_size": 16, **settings})

    return get
