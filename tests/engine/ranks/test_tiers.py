"""Tiers have each rank's part of a block, and give one rank's tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.replica_state import Numerics
from engine.core.engine_core import EngineCore
from engine.executor.kv_transfer import block_identity, make_kv_transfer
from engine.kv_transfer.disk_tier import DiskTier
from engine.kv_transfer.ranked_storage import RankedStorage, part_key
from tests.engine.families.conftest import checkpoint
from tests.engine.kv_transfer.test_offloading import (
    connector_of,
    forget_kv_cache,
    make,
    prompt,
    run,
)
from tests.waiting import wait_until

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
def test_ranks_begin_anew_after_a_step_that_some_may_have_saved(
    model_folder: Folder, options: dict[str, Any]
) -> None:
    folder, prompts = model_folder("llama"), {"r": prompt(1, 90)}
    expected = run(make(folder), prompts)
    with running(folder, kv_offloading_size=0.01, **options) as core:
        for _ in range(2):
            assert run(core, prompts) == expected
            forget_kv_cache(core)
            type(core.executor).resume(core.executor)
        assert matched(core) == 0
        for _ in range(2):
            assert run(core, prompts) == expected
            forget_kv_cache(core)
        assert matched(core) == 80


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
        ("llama", {"kv_offloading_backend": "redis://h"}, "2 ranks save blocks in host memory"),
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


@contextmanager
def on_disk(folder: Path, tier: Path, **settings: Any) -> Iterator[EngineCore]:
    settings = {"kv_offloading_size": 0.01, "kv_offloading_backend": str(tier), **settings}
    with running(folder, **settings) as core:
        yield core


def matched(core: EngineCore) -> int:
    return connector_of(core).num_matched_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        STAGES,
        pytest.param({**STAGES, "pipeline_layer_partition": "1,2"}, marks=pytest.mark.slow),
        pytest.param({**STAGES, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param(
            {"decode_context_parallel_size": 2, "block_size": 256, "kv_offloading_size": 0.02},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_ranks_load_from_a_folder_what_these_have_written(
    model_folder: Folder, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder, size = model_folder("llama"), options.get("block_size", 16)
    prompts = {"a": prompt(1, size + 70), "b": prompt(2, 32)}
    settings = {"max_model_len": 512, **options}
    dtype = options.get("kv_cache_dtype", "auto")
    expected = run(make(folder, kv_cache_dtype=dtype, max_model_len=512), prompts)
    with on_disk(folder, tmp_path, **settings) as core:
        assert run(core, prompts) == expected
    with on_disk(folder, tmp_path, **settings) as core:
        assert run(core, prompts, cache_namespace="another") == expected
        assert matched(core) == 0
        assert run(core, prompts) == expected
        assert matched(core) == sum((len(p) - 1) // size * size for p in prompts.values())
        assert not core.snapshot().kv_tier_failures_total


def test_a_part_of_another_rank_that_is_damaged_or_deleted_is_computed_and_written_again(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder, prompts = model_folder("llama"), {"a": prompt(1, 70)}
    expected = run(make(folder), prompts)
    with on_disk(folder, tmp_path) as core:
        connector = connector_of(core)
        assert isinstance(connector.storage, RankedStorage)
        tier = cast(DiskTier, connector.storage.tier)

        def loaded_tokens() -> int:
            """Of the prompt, by ranks that have nothing in memory, and know what is written."""
            assert connector.storage is not None
            connector.storage.flush()
            tier.refresh()
            connector.host.clear()
            run(core, {"other": prompt(9, 3)})  # plans have the other rank do so, too
            forget_kv_cache(core)
            previous_tokens = matched(core)
            assert run(core, prompts) == expected
            return matched(core) - previous_tokens

        assert run(core, prompts) == expected
        assert loaded_tokens() == 64
        keys = tier.keys()  # as they were written: in the order of tokens
        parts = [part_key(key, 1) for key in keys if part_key(key, 1) in tier]
        location = tier._index[parts[2]]
        assert len(parts) == 4
        with (tmp_path / location.segment).open("r+b") as file:
            file.seek(location.offset)
            file.write(bytes(8))
        assert loaded_tokens() == 32
        assert core.snapshot().kv_tier_failures_total == {"authentication": 1}
        assert loaded_tokens() == 64
        names = {tier._index[part].segment for part in parts}
        for name in names:
            (tmp_path / name).unlink()
        assert loaded_tokens() == 0
        # The other rank notices within a second what is gone.
        wait_until(lambda: loaded_tokens() == 64)


@pytest.mark.slow
def test_a_part_deleted_between_look_up_and_read_is_computed(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder, prompts = model_folder("llama"), {"a": prompt(1, 70)}
    expected = run(make(folder), prompts)
    with on_disk(folder, tmp_path, **STAGES) as core:
        assert run(core, prompts) == expected
    with on_disk(folder, tmp_path, **STAGES) as core:
        connector = connector_of(core)
        assert connector.storage is not None
        tier = cast(DiskTier, connector.storage.tier)
        keys = tier.keys()
        parts = [part_key(key, 1) for key in keys if part_key(key, 1) in tier]
        for name in {tier._index[part].segment for part in parts}:
            (tmp_path / name).unlink()
        connector.storage._refreshed_at = time.monotonic()  # it looks for others' once a second
        assert run(core, prompts) == expected
        assert matched(core) == 0
        assert core.snapshot().kv_tier_failures_total == {"deleted": 1}


@pytest.mark.slow
def test_blocks_of_two_and_of_four_ranks_share_a_folder(
    model_folder: Folder, tmp_path: Path
) -> None:
    """Four ranks have two copies of each head, of the same shape as two ranks' heads."""
    folder, prompts = model_folder("llama"), {"a": prompt(1, 70)}
    expected = run(make(folder), prompts)
    for loaded in (0, 64):
        for size in (2, 4):
            with on_disk(folder, tmp_path, tensor_parallel_size=size) as core:
                assert run(core, prompts) == expected
                assert matched(core) == loaded


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"async_scheduling": True}, STAGES])
def test_ranks_load_blocks_while_their_memory_evicts_others(
    model_folder: Folder, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = model_folder("llama")
    prompts = {f"r{seed}": prompt(seed, 60 + 10 * seed) for seed in range(8)}
    expected = run(make(folder), prompts)
    # Memory has room for 12 blocks, fewer than half of them.
    with on_disk(folder, tmp_path, num_gpu_blocks_override=12, max_num_seqs=2, **options) as core:
        for _ in range(6):
            assert run(core, prompts) == expected
            forget_kv_cache(core)
        connector = connector_of(core)
        assert matched(core)
        assert connector.host.used_bytes <= connector.host.capacity
        assert not core.snapshot().kv_tier_failures_total


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, STAGES])
def test_a_group_loads_what_another_has_just_computed(
    model_folder: Folder, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder, prompts = model_folder("llama"), {"a": prompt(1, 70)}
    expected = run(make(folder), prompts)
    roles = [{"kv_transfer_config": {"kv_role": role}} for role in ("kv_producer", "kv_consumer")]
    with (
        on_disk(folder, tmp_path, **roles[0], **options) as producer,
        on_disk(folder, tmp_path, **roles[1], **options) as consumer,
    ):
        run(producer, prompts, max_tokens=1)
        connector_of(producer).wait_until_saved(10.0)
        assert run(consumer, prompts, prefilled=True) == expected
        assert matched(consumer) == 64
        assert connector_of(producer).key_space == connector_of(consumer).key_space != ""
