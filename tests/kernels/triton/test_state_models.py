"""Models whose layers carry a state, on the Triton kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.models.decoder import NativeDecoder
from engine.worker.gpu.setup import warm_up_kernels
from kernels.triton import TritonKernels
from tests.survey.foreign import FOREIGN
from tests.survey.published import PUBLISHED
from tests.survey.recipes import RECIPES
from tests.survey.run import make

QUICK = ("falcon_h1", "kimi_linear", "lfm2", "mamba", "recurrent_gemma")
OTHER_FAMILIES = ("granite4", "jamba", "mamba2", "minimax", "nemotron_h", "qwen3_next", "zamba2")
NAMES = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_FAMILIES))
PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 9, 8, 7], [60, 61]]
#: Two blocks of it are in the prefix cache then.
AGAIN = [*PROMPTS[0][:9], 70]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    llm.core.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(name: str, forced: None, tmp_path: Path) -> None:
    """In chunks, beside one another, and from a checkpoint at the end of a prompt."""
    recipe = {**RECIPES, **FOREIGN, **PUBLISHED}[name]
    _, folder, make_oracle = make(recipe, tmp_path)
    llm = LLM(
        str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=40, max_model_len=64,
        max_num_batched_tokens=8, block_size=4,
    )  # fmt: skip
    model, oracle = llm.core.executor.worker.loaded.model, make_oracle()
    assert isinstance(model, NativeDecoder)
    assert isinstance(model.ops, TritonKernels)
    assert tokens(llm, PROMPTS) == [oracle.greedy(prompt, 2) for prompt in PROMPTS]
    hits = llm.core.snapshot().prefix_cache_hits_total
    assert tokens(llm, [AGAIN]) == [oracle.greedy(AGAIN, 2)]
    assert llm.core.snapshot().prefix_cache_hits_total - hits == 8


def test_kernels_are_warmed_up_with_a_state_that_nobody_reads(forced: None, tmp_path: Path) -> None:
    _, folder, _ = make(RECIPES["lfm2"], tmp_path)
    llm = LLM(
        str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=40, max_model_len=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    expected = tokens(llm, PROMPTS[1:])
    worker = llm.core.executor.worker
    lengths = worker.capacity.layout.table_lengths(64, 16)
    config = EngineConfig(model=str(folder), max_num_seqs=2)
    warm_up_kernels(worker.loaded.model, config, 4, lengths, worker.loaded.spec.vocab_size)
    assert tokens(llm, PROMPTS[1:]) == expected
