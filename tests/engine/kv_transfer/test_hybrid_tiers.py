"""Windows, states and latents in tiers: the same tokens, fewer of them computed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from engine.kv_cache import BlockHashes
from engine.kv_transfer.disk_tier import DiskTier
from tests.engine.kv_transfer.remote_stores import running_store
from tests.engine.kv_transfer.test_disk_offloading import WRITER, failures, flush, on_disk
from tests.engine.kv_transfer.test_offloading import (
    Folder,
    connector_of,
    forget_kv_cache,
    make,
    prompt,
    run,
)
from tests.engine.models import FAMILIES, make_model
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

#: All layers have windows; some have; some carry states; all carry states; latents.
HYBRIDS = ["mistral", "qwen2-window", "lfm2", "granite4", "mamba2", "deepseek_v2"]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> folder of its random checkpoint."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folder = folders[name] = tmp_path_factory.mktemp(name)
            if name in FAMILIES:
                make_model(name, folder)
            else:
                make_checkpoint(RECIPES[name], folder)
        return folders[name]

    return get


def forget_all(core: EngineCore) -> None:
    """Empty all pools of the KV cache, but no tier."""
    forget_kv_cache(core)
    if core.scheduler.kv.states is not None:
        assert core.scheduler.kv.states.pool.reset_prefix_cache()


@pytest.mark.parametrize(
    ("name", "state_dtype"), [*((name, "auto") for name in HYBRIDS), ("granite4", "int8")]
)
def test_windows_states_and_latents_are_loaded_and_give_the_same_tokens(
    hybrid: Folder, tmp_path: Path, name: str, state_dtype: str
) -> None:
    prompts = {"a": prompt(1, 70), "b": prompt(2, 100)}
    settings = {"max_num_batched_tokens": 48, "mamba_ssm_cache_dtype": state_dtype}
    expected = run(make(hybrid(name), **settings), prompts)
    core = on_disk(hybrid(name), tmp_path, **settings)
    assert run(core, prompts) == expected
    flush(core)
    forget_all(core)
    connector_of(core).host.clear()
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens == 64 + 96
    assert not failures(core)
    core.shutdown()


@pytest.mark.parametrize("name", ["qwen2-window", "granite4", "mamba2"])
def test_blocks_of_a_hybrid_are_loaded_once_that_has_been_measured_to_be_faster(
    hybrid: Folder, name: str
) -> None:
    core = make(hybrid(name), kv_offloading_size=0.05)
    connector_of(core).set_prefill_pace(3600.0)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    forget_all(core)
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens == 64


@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "lfm2", "mamba2"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_later_turns_load_what_earlier_ones_have_left(
    hybrid: Folder, name: str, async_scheduling: bool
) -> None:
    """A longer prompt goes on from the longest beginning that all groups have."""
    settings = {"async_scheduling": async_scheduling}
    core = make(hybrid(name), kv_offloading_size=0.05, **settings)
    reference = make(hybrid(name), enable_prefix_caching=False, **settings)
    turn = prompt(1, 65)
    for number in range(4):
        (answer,) = run(reference, {"a": turn}).values()
        assert run(core, {"a": turn}) == {"a": answer}
        if number:
            assert connector_of(core).num_matched_tokens >= 64 * number
        forget_all(core)
        turn = [*turn, *answer, *prompt(number + 2, 20)]


def test_of_a_window_only_the_last_blocks_are_loaded_and_no_more_blocks_are_needed(
    hybrid: Folder,
) -> None:
    """A context that is longer than the pool: what a window has left is neither loaded nor
    allocated.
    """
    settings: dict[str, Any] = {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 48}
    core = make(hybrid("mistral"), kv_offloading_size=0.05, **settings)
    prompts = {"a": prompt(1, 200)}
    expected = run(make(hybrid("mistral"), **settings), prompts)
    assert run(core, prompts) == expected
    forget_all(core)
    written: list[int] = []
    buffers = connector_of(core)._buffers
    write = buffers.write_verified

    def counting(group: int, block_id: int, payloads: Any) -> bool:
        written.append(block_id)
        return write(group, block_id, payloads)

    buffers.write_verified = counting  # type: ignore[method-assign]
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens == 192
    assert len(written) == 2  # a window of 24 tokens


@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "lfm2", "mamba2"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_sequences_with_windows_or_states_come_back_from_the_swap_space(
    hybrid: Folder, name: str, async_scheduling: bool
) -> None:
    prompts = {f"r{seed}": prompt(seed, 40) for seed in range(5)}
    settings = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 64}
    expected = run(make(hybrid(name), **settings), prompts, max_tokens=40)
    core = make(hybrid(name), swap_space=0.05, **settings)
    preempted = 0
    schedule = core.scheduler.schedule

    def preempting() -> Any:
        nonlocal preempted
        if core.scheduler.num_steps % 7 == 5 and core.scheduler.running:
            core.scheduler._runs.preempt(core.scheduler.running[-1])
            preempted += 1
        return schedule()

    core.scheduler.schedule = preempting  # type: ignore[method-assign]
    assert run(core, prompts, max_tokens=40) == expected
    assert preempted > 4
    assert connector_of(core).num_saved_blocks
    assert connector_of(core).num_swapped == 0


@pytest.mark.parametrize("name", ["qwen2-window", "lfm2"])
def test_changed_windows_and_states_are_computed_and_counted(hybrid: Folder, name: str) -> None:
    core = make(hybrid(name), kv_offloading_size=0.05)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    host = connector_of(core).host
    for key in list(host._blocks):
        forget_all(core)
        host._blocks[key][0][3] ^= 1
        assert run(core, prompts) == expected
    assert host.failures["checksum"] > 3


def test_after_sigkill_a_hybrids_cache_is_warm(hybrid: Folder, tmp_path: Path) -> None:
    folder, token_ids = hybrid("lfm2"), prompt(1, 70)
    expected = run(make(folder), {"a": token_ids})
    words = " ".join(map(str, token_ids))
    command = [sys.executable, "-c", WRITER, str(folder), str(tmp_path), words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    core = on_disk(folder, tmp_path)
    assert run(core, {"a": token_ids}) == expected
    assert connector_of(core).num_matched_tokens == 64
    core.shutdown()


def test_a_connector_of_another_package_is_refused_for_a_hybrid(hybrid: Folder) -> None:
    config = {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": "tests.engine.kv_transfer.outside",
    }
    with pytest.raises(ConfigError, match="sliding windows or states") as refusal:
        make(hybrid("lfm2"), kv_transfer_config=config)
    assert refusal.value.param == "kv_transfer_config"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("redis", name) for name in ("mistral", "qwen2-window", "granite4", "mamba2")]
    + [("s3", "granite4")],
)
def test_a_prompt_that_goes_on_from_anothers_loads_that_ones_end_from_a_store(
    hybrid: Folder, tmp_path: Path, kind: str, name: str
) -> None:
    """What windows and states of its end need is nothing that the store has."""
    shared = prompt(1, 81)
    longer = {"b": [*shared, *prompt(2, 90)]}
    expected = run(make(hybrid(name)), longer)
    with running_store(kind, tmp_path) as records:
        settings = {"kv_offloading_size": 0.02, "kv_offloading_backend": records.url}
        first = make(hybrid(name), **settings)
        run(first, {"a": shared})
        flush(first)
        first.shutdown()
        second = make(hybrid(name), **settings)
        assert run(second, longer) == expected
        assert connector_of(second).num_matched_tokens == 80
        assert not failures(second)
        second.shutdown()


def test_tokens_are_not_hashed_by_a_reader(
    hybrid: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that it is too late for runs meanwhile: a block hashed twice would be another's."""
    monkeypatch.setattr(DiskTier, "is_indexed", False)
    prompts = {"a": prompt(1, 81)}
    core = on_disk(hybrid("mistral"), tmp_path)
    expected = run(core, prompts)
    flush(core)
    forget_all(core)
    connector_of(core).host.clear()
    threads, hash_full_blocks = set[int](), BlockHashes.hash_full_blocks

    def recorded(hashes: BlockHashes, token_ids: list[int], block_size: int) -> list[bytes]:
        threads.add(threading.get_ident())
        return hash_full_blocks(hashes, token_ids, block_size)

    monkeypatch.setattr(BlockHashes, "hash_full_blocks", recorded)
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens == 80
    assert threads == {threading.get_ident()}
    core.shutdown()
