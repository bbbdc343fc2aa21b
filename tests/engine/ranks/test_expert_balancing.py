"""Experts that move between ranks, and copies of them, change no bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.eplb_config import EPLBConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.distributed.expert_placement import assign_experts, balancedness
from engine.executor.expert_balancer import ExpertBalancer
from tests.engine.families.conftest import checkpoint
from tests.engine.ranks.test_tensor_parallel import PROMPTS

__all__ = ["checkpoint"]

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
EPLB = {"num_redundant_experts": 2, "step_interval": 6, "window_size": 4}


def outputs(llm: LLM) -> list[Any]:
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    results = [result.outputs[0] for result in llm.generate(inputs, PARAMS, use_tqdm=False)]
    return [(result.token_ids, result.logprobs) for result in results]


@pytest.mark.system
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_experts_move_while_steps_run_and_the_bits_are_those_of_one_rank(
    name: str, checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_gpu_blocks_override": 64, "num_threads": 2, "skip_tokenizer_init": True}
    folder = str(checkpoint(name))
    one = LLM(folder, **options)
    expected = outputs(one)
    one.core.shutdown()
    options |= {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": EPLB}
    options["enable_sleep_mode"] = True
    llm = LLM(folder, tensor_parallel_size=2, **options)
    try:
        model = llm.core.executor.worker.loaded.model
        layers = [weights.experts for weights in model.weights if weights.experts is not None]
        previous = [experts.layers.owners for experts in layers]
        count = len(previous[0])
        assert sum(map(len, previous[0])) == count + 2
        with caplog.at_level(logging.INFO, logger="engine.executor.expert_balancer"):
            for _ in range(4):
                assert outputs(llm) == expected
        assert "ranks are balanced to" in caplog.text
        after = [experts.layers.owners for experts in layers]
        assert after != previous
        assert sum(map(len, after[0])) == count + 2
        load_experts = model.load_experts

        def fail(layer: int, requested: list[int]) -> Any:
            raise OSError("the disk is gone")

        model.load_experts = fail
        layers[0].loads[:] = 0
        assert outputs(llm) == expected  # what one rank can't read moves on none
        model.load_experts = load_experts
        assert outputs(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert outputs(llm) == expected
        weights = llm.core.executor.worker.loaded.model.weights
        woken = [layer.experts.layers.owners for layer in weights if layer.experts is not None]
        assert woken != previous  # those of the weights that were read anew move, too
    finally:
        llm.core.shutdown()


@pytest.mark.parametrize("window_size", [6, 4])
def test_tokens_of_the_window_are_counted(
    window_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = SimpleNamespace(loads=np.zeros(2, dtype=np.int64))
    model = SimpleNamespace(weights=[SimpleNamespace(experts=experts)])
    settings = EPLBConfig(step_interval=6, window_size=window_size)
    balancer = ExpertBalancer(cast(Any, SimpleNamespace(model=model)), settings)
    seen: list[int] = []
    monkeypatch.setattr(balancer, "_rebalance", lambda index, of: seen.append(of.loads.sum()))
    for step in range(1, 19):
        balancer.begin_step(step)
        experts.loads += [1, 0]
    assert seen[1:] == [window_size, window_size]


def test_all_layers_are_balanced_however_short_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [SimpleNamespace(experts=SimpleNamespace(loads=np.zeros(2))) for _ in range(5)]
    settings = EPLBConfig(step_interval=2, window_size=2)
    model = SimpleNamespace(weights=layers)
    balancer = ExpertBalancer(cast(Any, SimpleNamespace(model=model)), settings)
    seen: list[int] = []
    monkeypatch.setattr(balancer, "_rebalance", lambda index, of: seen.append(index))
    balancer.begin_step(2)
    balancer.begin_step(3)
    assert seen == [0, 2, 4, 1, 3]


def test_the_busiest_experts_get_the_copies_and_ranks_as_many_each() -> None:
    loads = [100, 10, 10, 60, 10, 10]
    owners = assign_experts(loads, 2, 2)
    assert [len(ranks) for ranks in owners] == [2, 1, 1, 2, 1, 1]
    assert [sum(rank in ranks for ranks in owners) for rank in (0, 1)] == [4, 4]
    contiguous = [(0,), (0,), (0,), (1,), (1,), (1,)]
    assert balancedness(loads, owners, 2) == 1.0
    assert balancedness(loads, contiguous, 2) == pytest.approx(100 / 120)
    assert assign_experts([0] * 4, 2, 100) == [(0, 1)] * 4  # no rank needs two of one
    assert assign_experts([5, 1, 1, 5], 2, 0, [(1,), (0,), (1,), (0,)])[0] == (1,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "enable_eplb needs enable_expert_parallel"),
        ({"eplb_config": {"experts": 1}}, "eplb_config: there is no experts"),
        ({"eplb_config": {"num_redundant_experts": -1}}, "must be at least 0"),
        ({"eplb_config": {"step_interval": 10, "window_size": 11}}, r"step_interval = 10\]"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="m", enable_eplb=True, **changes)


@pytest.mark.system
@pytest.mark.usefixtures("compiler")
def test_a_model_without_experts_is_refused(model_folder: Callable[[str], Path]) -> None:
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        EngineCore(EngineConfig(model=str(model_folder("llama")), **options))
