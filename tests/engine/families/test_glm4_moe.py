"""GLM-4.5: sigmoids, biases that choose but don't weigh, and groups, which the bridge does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.contract.errors import ModelLoadError
from engine.models.decoder import NativeDecoder
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 200, 31, 77, 300, 12, 13, 9, 45]


def tokens(folder: Path, **settings: object) -> tuple[list[int], LLM]:
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=40, max_model_len=128, **settings
    )
    return list(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids), llm


def test_experts_are_chosen_by_their_biases_too(tmp_path: Path) -> None:
    make_checkpoint(RECIPES["glm4_moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert len(names) == 2  # the first of three layers has no experts
    unbiased = Oracle(tmp_path).greedy(PROMPT, 8)
    for name in names:
        tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(3))
    save_file(tensors, file, metadata={"format": "pt"})
    expected = Oracle(tmp_path).greedy(PROMPT, 8)
    assert expected != unbiased
    for compiled in (True, False):
        output_tokens, llm = tokens(tmp_path, cpu_kernels=compiled)
        assert output_tokens == expected
        assert isinstance(llm.core.executor.worker.loaded.model, NativeDecoder)


def test_groups_of_experts_are_left_to_the_bridge(tmp_path: Path) -> None:
    make_checkpoint({**RECIPES["glm4_moe"], "n_group": 2, "topk_group": 1}, tmp_path)
    output_tokens, llm = tokens(tmp_path)
    assert output_tokens == Oracle(tmp_path).greedy(PROMPT, 8)
    assert not isinstance(llm.core.executor.worker.loaded.model, NativeDecoder)
    with pytest.raises(ModelLoadError, match="n_group = 2 isn't supported"):
        tokens(tmp_path, model_impl="quire")
