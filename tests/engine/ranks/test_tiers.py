"""A tier in host memory has each rank's part of a block, and gives one rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.replica_state import Numerics
from engine.core.engine_core import EngineCore
from engine.executor.kv_transfer import block_identity, make_kv_transfer
from tests.engine.families.conftest import checkpoint
from tests.engine.kv_transfer.test_offloading import forget_kv_cache, make, prompt, run

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[EngineCore]:
    core = make(folder, **{"num_threads": 2, "tensor_parallel_size": 2} | settings)
    resume, failures = core.executor.resume, list[str]()

    def counted() -> None:
        failures.append("a step failed")
        resume()

    core.executor.resume = counted  # type: ignore[method-assign]
    try:
        yield core
        assert not failures
    finally:
        core.shutdown()


STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        pytest.param({"async_scheduling": False}, marks=pytest.mark.slow),
        STAGES,
        pytest.param({**STAGES, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_load_what_they_have_saved_while_the_tier_evicts(
    model_folder: Folder, options: dict[str, Any]
) -> None:
    folder = model_folder("llama")
    prompts = {f"r{seed}": prompt(seed, 90 + seed) for seed in range(6)}
    expected = run(make(folder), prompts)
    with running(folder, kv_offloading_size=0.0004, **options) as core:
        for _ in range(2):
            assert run(core, prompts) == expected
            forget_kv_cache(core)
            # Alone, what was used last is in the tier still.
            assert run(core, {"r5": prompts["r5"]})["r5"] == expected["r5"]
            forget_kv_cache(core)
        connector = core.scheduler.kv_connector
        assert connector.num_matched_tokens
        assert connector.host.used_bytes <= connector.host.capacity
        core.reset_prefix_cache()
        assert run(core, prompts) == expected


@pytest.mark.slow
def test_as_many_blocks_fit_into_stages_with_other_numbers_of_layers(model_folder: Folder) -> None:
    folder, size = model_folder("llama"), 2**16
    prompts = {"r": prompt(1, 90)}
    expected = run(make(folder), prompts)
    options = {**STAGES, "pipeline_layer_partition": "1,2", "kv_offloading_size": size / 2**30}
    with running(folder, **options) as core:
        for _ in range(2):
            assert run(core, prompts) == expected
            forget_kv_cache(core)
        connector = core.scheduler.kv_connector
        # A block of a layer has 4 KiB: a third of the tier is the first stage's.
        assert connector.host.capacity == size // 3
        assert connector.num_matched_tokens


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, STAGES])
def test_sequences_of_two_ranks_are_swapped(model_folder: Folder, options: dict[str, Any]) -> None:
    folder = model_folder("llama")
    prompts = {f"r{seed}": prompt(seed, 60) for seed in range(5)}
    expected = run(make(folder), prompts)
    with running(folder, swap_space=0.1, num_gpu_blocks_override=16, **options) as core:
        assert run(core, prompts) == expected
        assert core.scheduler.num_preemptions
        assert core.scheduler.kv_connector.num_saved_blocks


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"kv_offloading_backend": "/tmp/tier"}, "2 ranks save blocks in host memory"),
        ("gemma2", STAGES, "each of 2 stages has other kinds of Gemma2ForCausalLM's layers"),
    ],
)
def test_what_ranks_cannot_save_is_refused_by_name(
    checkpoint: Folder, family: str, changes: dict[str, Any], reason: str
) -> None:
    options = {"tensor_parallel_size": 2, "kv_offloading_size": 0.01} | changes
    with pytest.raises(ConfigError, match=f"kv_offloading_size can't be used: {reason}"):
        EngineCore(EngineConfig(model=str(checkpoint(family)), **options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"distributed_executor_backend": "external_launcher"},
            "ranks of a launcher would find other blocks in their tiers",
        ),
        (
            {"ec_transfer_config": {"ec_role": "ec_both"}},
            "outputs of encoders can't be saved by several ranks",
        ),
    ],
)
def test_tiers_of_launchers_and_of_encoders_outputs_are_refused(
    options: dict[str, Any], reason: str
) -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, kv_offloading_size=0.01, **options)
    with pytest.raises(ConfigError, match=reason):
        make_kv_transfer(config, Mock(stage=None))


def test_blocks_of_models_that_are_shared_in_other_ways_are_others() -> None:
    cuts: list[dict[str, Any]] = [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "block_size": 256},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "pipeline_layer_partition": "2,2"},
        {"pipeline_parallel_size": 3, "pipeline_layer_partition": "1,2,1"},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ]
    numerics = Numerics(weights="sha256")

    def identity(**cut: Any) -> bytes:
        return block_identity(EngineConfig(model="m", **cut), numerics, 256)

    assert len({identity(**cut) for cut in cuts}) == len(cuts)
    spaced = {"pipeline_parallel_size": 2, "pipeline_layer_partition": " 2, 2"}
    assert identity(**spaced) == identity(**cuts[5])
