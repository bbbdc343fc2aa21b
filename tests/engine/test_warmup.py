"""What a replica does before it says that it is ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.contract.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
from tests.engine.speculative.eager import eager_model


def started(folder: Path, **settings: Any) -> EngineCore:
    """An engine that is warm."""
    core = EngineCore(EngineConfig(model=str(folder), num_gpu_blocks_override=50, **settings))
    warm_up(core)
    return core


def test_prompts_beside_decodes_are_bounded_by_what_prompts_take_here(
    model_folder: Callable[[str], Path],
) -> None:
    core = started(model_folder("llama"))
    assert core.scheduler.limits.share.max_prompt_tokens >= 32
    assert (
        core.scheduler.limits.share.saturation_decodes,
        core.scheduler.limits.share.min_step_tokens,
    ) == (64, 72)
    assert core.stats.steps_total == 0
    assert core.scheduler.kv.pool.num_cached == 0
    core.check_integrity()


def test_slow_prompts_get_the_least_share(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.warmup.MAX_PREFILL_SECONDS", 1e-9)
    assert started(model_folder("llama")).scheduler.limits.share.max_prompt_tokens == 32


@pytest.mark.parametrize(("setting", "max_decodes"), [(7, 7), (0, 512)])
def test_a_number_that_was_given_stays(
    setting: int, max_decodes: int, model_folder: Callable[[str], Path]
) -> None:
    core = started(model_folder("llama"), prefill_tokens_beside_decodes=setting)
    assert (
        core.scheduler.limits.share.max_prompt_tokens,
        core.scheduler.limits.share.saturation_decodes,
    ) == (max_decodes, 0)


def test_a_model_with_room_for_a_few_tokens_starts(model_folder: Callable[[str], Path]) -> None:
    core = started(model_folder("llama"), max_model_len=5)
    assert not core.has_work


def test_what_wider_steps_take_is_known_before_anybody_asks(
    model_folder: Callable[[str], Path],
) -> None:
    core = started(model_folder("llama"), speculative_config={"method": "suffix"}, max_num_seqs=16)
    assert core.drafter is not None
    assert core.drafter.costs.widest == 16
    assert not core.drafter._proposer._outputs  # type: ignore[union-attr]
    assert core.stats.steps_total == 0
    core.check_integrity()


def test_offline_it_is_known_too_and_leaves_no_trace(model_folder: Callable[[str], Path]) -> None:
    config = {"method": "ngram"}
    llm = LLM(str(model_folder("llama")), num_gpu_blocks_override=50, speculative_config=config)
    core = llm.core
    assert core.drafter is not None
    assert core.drafter.costs.widest >= 8
    assert core.stats.steps_total == 0
    assert core.scheduler.kv.pool.num_cached == 0
    assert not core.has_work
    core.check_integrity()


def test_what_a_head_takes_is_measured_once_it_is_warm(tmp_path: Path) -> None:
    """Its first draws are slow: taken for what it costs, they'd keep it from ever being tried."""
    folder, head = eager_model(tmp_path)
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": 4}
    core = started(folder, speculative_config=config, max_num_seqs=4)
    assert core.drafter is not None
    assert core.drafter.model is not None
    assert core.drafter.model.costs.widest >= 1
    assert core.drafter.costs.widest >= 4
    assert not core.drafter.timing
    assert core.stats.steps_total == 0
    core.check_integrity()
