"""`transformers` runs a checkpoint by its own path, on its own packages: tokens are the same.

Those packages leave activations as they are, as plain torch does here; what the kernels round is
held against a model that rounds likewise (test_formats.py). Not compared: LLM.int8 of bitsandbytes,
which rounds activations in a way of its own, NVFP4, which becomes bfloat16 there, and what has no
CPU path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from engine import LLM
from tests.engine.checkpoints.folders import make_pair
from tests.engine.checkpoints.test_formats import FORMATS, PROMPT, SMALL, logits_of
from tests.engine.models import Oracle, make_model

PACKED = (
    "fp8-block", "fp8-e5m2-block", "bnb-nf4", "bnb-fp4", "bnb-nested", "ct-w4a16", "ct-w3a16",
    "ct-w8a16", "ct-fp8-tensor", "ct-fp8-row",
)  # fmt: skip
#: What compressed-tensors runs once it has dequantized all of it.
DEQUANTISED = ("ct-w4a16-zeros", "ct-w8a8", "ct-w8-zeros", "ct-mxfp4")
PROMPTS = [PROMPT, [9, 8, 7, 30, 31], [101, 202, 303, 44]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of widths that bitsandbytes' CPU kernels are right for."""
    folder = tmp_path_factory.mktemp("wide")
    return make_model("llama", folder, hidden_size=128, intermediate_size=256, head_dim=32)


def oracle_of(folder: Path, **settings: Any) -> Oracle:
    """`transformers` with the packed weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
    return Oracle(folder, model.eval())


def assert_same(folder: Path, oracle: Oracle) -> None:
    llm = LLM(str(folder), cpu_kernels=False, **SMALL)
    for prompt in PROMPTS:
        logit_row = logits_of(llm, prompt, 6)[0]
        assert logit_row == oracle.greedy(prompt, 6, logit_row)


@pytest.mark.parametrize("name", PACKED)
def test_tokens_of_packed_weights(name: str, source: Path, tmp_path: Path) -> None:
    stored_format = FORMATS[name]
    packed = make_pair(source, tmp_path, stored_format.config, stored_format.write).packed
    assert_same(packed, oracle_of(packed))


@pytest.mark.parametrize("name", DEQUANTISED)
def test_tokens_of_what_it_dequantizes(name: str, source: Path, tmp_path: Path) -> None:
    stored_format = FORMATS[name]
    packed = make_pair(source, tmp_path, stored_format.config, stored_format.write).packed
    config = CompressedTensorsConfig(dequantize=True)  # type: ignore[no-untyped-call]
    assert_same(packed, oracle_of(packed, quantization_config=config))


def _eight() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _four() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))


@pytest.mark.parametrize("config", [_eight, _four])
def test_tokens_of_what_torchao_wrote(
    config: Callable[[], Any], source: Path, tmp_path: Path
) -> None:
    """Its whole folder is by `transformers`."""
    from transformers import TorchAoConfig

    model = oracle_of(source, quantization_config=TorchAoConfig(config()), device_map="cpu").model
    model.save_pretrained(tmp_path)
    for path in source.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert_same(tmp_path, oracle_of(tmp_path, device_map="cpu"))
