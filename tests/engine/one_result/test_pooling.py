"""A prompt's vector has the same bits alone, beside others and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from tests.engine.pooling.conftest import pooling_model
from tests.engine.pooling.models import DECODERS, ENCODERS

pytestmark = pytest.mark.usefixtures("compiler")
Maker = Callable[..., Path]

__all__ = ["pooling_model"]

PROMPTS = [
    [(7 * index + start) % 190 for index in range(length)]
    for start, length in ((5, 80), (11, 86), (30, 105), (2, 3), (9, 80), (17, 3), (40, 1))
]


def vectors(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    outputs = llm.embed(prompts, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def run_separately(llm: LLM) -> torch.Tensor:
    return torch.cat([vectors(llm, [prompt]) for prompt in PROMPTS])


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders(kind: str, pooling_model: Maker) -> None:
    llm = LLM(str(pooling_model(kind)))
    assert torch.equal(vectors(llm, PROMPTS), run_separately(llm))


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_in_chunks(kind: str, pooling: str, pooling_model: Maker) -> None:
    settings: dict[str, Any] = {"pooler_config": {"pooling_type": pooling}}
    full_llm = LLM(str(pooling_model(kind)), num_gpu_blocks_override=64, **settings)
    small = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 32}
    cut = LLM(str(pooling_model(kind)), **small, **settings)
    expected = run_separately(full_llm)
    for _ in range(2):  # the second time prefixes are cached, where pooling lets them
        assert torch.equal(vectors(cut, PROMPTS), expected)
