"""Models with sliding windows give the same tokens however their blocks come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.kv_cache import NULL_BLOCK
from tests.engine.families.conftest import OUTPUT, Case

#: Family -> windows of its KV cache groups.
GROUPS = {
    "gemma2": (0, 24, 24),
    "gemma3": (0, 24, 24),
    "mistral": (24,),
    "gpt_oss": (0, 24),
}
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
Cases = Callable[[str], Case]


def make(case: Case, **settings: Any) -> LLM:
    settings = {"num_gpu_blocks_override": 400, "block_size": 4, "max_model_len": 256, **settings}
    return LLM(str(case.folder), dtype="float32", num_threads=1, **settings)


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_free_blocks == llm.core.capacity.num_blocks
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", GROUPS)
def test_alone_together_and_cached(family: str, case: Cases) -> None:
    expected = case(family)
    llm = make(expected)
    kv = llm.core.scheduler.kv
    assert kv.windows == GROUPS[family]
    assert [run(llm, [prompt])[0] for prompt in expected.prompts] == expected.greedy
    llm.core.reset_prefix_cache()
    assert run(llm, expected.prompts) == expected.greedy
    initial_num_hit_tokens = kv.num_hit_tokens
    assert run(llm, expected.prompts) == expected.greedy
    assert kv.num_hit_tokens - initial_num_hit_tokens > 150


@pytest.mark.parametrize("family", GROUPS)
def test_preempted_and_in_chunks_while_blocks_leave_the_window(family: str, case: Cases) -> None:
    expected = case(family)
    groups = len(GROUPS[family])
    llm = make(expected, num_gpu_blocks_override=10 + 14 * groups, max_num_batched_tokens=16)
    freed = 0
    free = llm.core.scheduler.kv.pool.free_blocks

    def counting(blocks: list, *account: Any) -> None:
        nonlocal freed
        freed += bool(llm.core.scheduler.running) and len(blocks)
        free(blocks, *account)

    llm.core.scheduler.kv.pool.free_blocks = counting  # type: ignore[assignment,method-assign]
    assert run(llm, expected.prompts * 2) == expected.greedy * 2
    assert freed > 0
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_the_switch_keeps_all_blocks_and_changes_no_token(family: str, case: Cases) -> None:
    expected = case(family)
    llm = make(expected, disable_hybrid_kv_cache_manager=True)
    assert llm.core.scheduler.kv.windows == (0,)
    assert run(llm, expected.prompts) == expected.greedy


def test_a_long_output_of_a_sliding_model_runs_in_few_blocks(case: Cases) -> None:
    llm = make(case("mistral"), num_gpu_blocks_override=14, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    max_blocks = 0
    step = llm.core.step

    def watching() -> object:
        nonlocal max_blocks
        deltas = step()
        for table in llm.core.scheduler.kv.managers[0].tables.values():
            max_blocks = max(max_blocks, sum(block is not NULL_BLOCK for block in table))
        return deltas

    llm.core.step = watching  # type: ignore[assignment,method-assign]
    llm.generate([[7, 8, 9]], params, use_tqdm=False)
    assert max_blocks <= 7


def test_a_sliding_model_takes_contexts_longer_than_its_pool(case: Cases) -> None:
    llm = make(case("mistral"), num_gpu_blocks_override=16, max_num_batched_tokens=16)
    full_llm = make(case("mistral"), disable_hybrid_kv_cache_manager=True)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    prompt = case("mistral").longest
    assert llm.core.scheduler.capacity_tokens > len(prompt) + 150
    got, expected = (
        one.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
        for one in (llm, full_llm)
    )
    assert got == expected


def test_a_pool_without_a_block_for_each_group_is_refused(case: Cases) -> None:
    with pytest.raises(ConfigError, match="at least 3") as error:
        make(case("gemma3"), num_gpu_blocks_override=2)
    assert error.value.param == "num_gpu_blocks_override"


def test_the_pool_of_a_hybrid_model_has_smaller_and_more_blocks(case: Cases) -> None:
    hybrid = make(case("gemma3"), num_gpu_blocks_override=None, cpu_kvcache_space=0.001)
    baseline_llm = make(
        case("gemma3"),
        num_gpu_blocks_override=None,
        cpu_kvcache_space=0.001,
        disable_hybrid_kv_cache_manager=True,
    )
    sizes = [
        {
            id(cache): cache.nbytes
            for pair in llm.core.executor.worker.loaded.model.kv_caches
            for cache in pair[:2]
        }
        for llm in (hybrid, baseline_llm)
    ]
    memory = [sum(size.values()) for size in sizes]
    assert memory[0] == pytest.approx(memory[1], rel=0.02)
    assert hybrid.core.capacity.num_blocks == pytest.approx(
        3 * baseline_llm.core.capacity.num_blocks, 2
    )
