"""KV blocks in host memory: the same tokens, fewer of them computed."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.kv_transfer_config import PACKAGED_CONNECTORS
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.devices.cpu import CpuDevice
from engine.kv_cache import BlockHashes
from engine.kv_transfer.eviction_history import GHOST_FACTOR
from engine.kv_transfer.offloading_connector import OffloadingConnector
from tests.engine.kv_transfer.outside import DictConnector
from tests.engine.models import VOCAB
from tests.waiting import free_port

Folder = Callable[[str], Path]


def make(folder: Path, **settings: Any) -> EngineCore:
    settings = {"num_gpu_blocks_override": 64, "max_model_len": 256, **settings}
    return EngineCore(EngineConfig(model=str(folder), **settings))


def connector_of(core: EngineCore) -> OffloadingConnector:
    connector = core.scheduler.kv_connector
    assert isinstance(connector, OffloadingConnector)
    return connector


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def message(
    request_id: str, token_ids: list[int], max_tokens: int = 8, **fields: Any
) -> EngineRequest:
    """A request for greedy tokens."""
    return EngineRequest(
        request_id=request_id,
        gateway_id="g",
        prompt_token_ids=token_ids,
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


def run(
    core: EngineCore, prompts: dict[str, list[int]], until: str = "", **fields: Any
) -> dict[str, list[int]]:
    """Greedy tokens by request id; a request without a prompt is there already. `until`: the
    request whose end is waited for, not all of them.
    """
    for request_id, token_ids in prompts.items():
        if not token_ids:
            continue
        core.add_request(message(request_id, token_ids, **fields))
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    for _ in range(5000):
        if not core.has_work:
            break
        for delta in core.step():
            assert delta.finish_reason in (None, "length"), delta
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason and delta.request_id == until:
                return tokens
    core.check_integrity()
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks
    return tokens


def forget_kv_cache(core: EngineCore) -> None:
    """Empty the KV cache, but no tier."""
    assert core.scheduler.kv.pool.reset_prefix_cache()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_prefix_that_left_the_kv_cache_is_loaded_and_gives_the_same_tokens(
    model_folder: Folder, async_scheduling: bool, kv_cache_dtype: str
) -> None:
    settings = {"async_scheduling": async_scheduling, "kv_cache_dtype": kv_cache_dtype}
    core = make(model_folder("llama"), kv_offloading_size=0.01, **settings)
    prompts = {"a": prompt(1, 70)}
    expected = run(make(model_folder("llama"), **settings), prompts)
    assert run(core, prompts) == expected
    assert connector_of(core).num_saved_blocks == 4
    forget_kv_cache(core)
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens == 64


def test_only_the_blocks_after_the_kv_caches_own_prefix_are_loaded(model_folder: Folder) -> None:
    core = make(model_folder("llama"), kv_offloading_size=0.01)
    shared = prompt(1, 32)
    long = shared + prompt(2, 40)
    expected = run(core, {"a": long})
    forget_kv_cache(core)
    run(core, {"b": [*shared, 5]})
    assert connector_of(core).num_matched_tokens == 32
    assert run(core, {"a": long}) == expected
    assert connector_of(core).num_matched_tokens == 32 + 32


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_swapped_sequences_come_back_with_no_token_computed_twice(
    model_folder: Folder, async_scheduling: bool
) -> None:
    prompts = {f"r{seed}": prompt(seed, 40) for seed in range(5)}
    settings = {"num_gpu_blocks_override": 14, "async_scheduling": async_scheduling}
    expected = run(make(model_folder("llama")), prompts, max_tokens=60)
    core = make(model_folder("llama"), swap_space=0.01, **settings)
    computed = 0
    schedule = core.scheduler.schedule

    def counting() -> Any:
        nonlocal computed
        plan, scheduled = schedule()
        computed += plan.num_tokens
        return plan, scheduled

    core.scheduler.schedule = counting  # type: ignore[method-assign]
    assert run(core, prompts, max_tokens=60) == expected
    assert core.scheduler.num_preemptions > 2
    # Each output token but the last is computed, too.
    assert computed == sum(len(tokens) for tokens in prompts.values()) + 5 * 59
    assert connector_of(core).num_swapped == 0


def test_a_preempted_sequence_is_saved_after_the_step_in_flight_even_if_no_other_follows(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends with the step that fills the blocks of the second, which then needs one more
    and has to give its own: nothing can be scheduled while that step runs.
    """
    settings = {"num_gpu_blocks_override": 4, "max_model_len": 64, "async_scheduling": True}
    core = make(model_folder("llama"), swap_space=0.01, **settings)
    worker = core.executor.worker
    launch = worker.launch

    def launch_late(plan: Any, inputs: Any) -> Any:
        time.sleep(0.05)
        return launch(plan, inputs)

    monkeypatch.setattr(worker, "launch", launch_late)
    prompts = {"first": prompt(1, 20), "second": prompt(2, 20)}
    core.add_request(message("first", prompts["first"], 13))
    tokens = run(core, {"second": prompts["second"]}, max_tokens=30)
    assert core.scheduler.num_preemptions == 1
    expected = run(make(model_folder("llama")), prompts, max_tokens=30)
    assert tokens == {"first": expected["first"][:13], "second": expected["second"]}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_sequences_that_sleep_put_out_of_the_kv_cache_come_back(
    model_folder: Folder, async_scheduling: bool
) -> None:
    prompts = {f"r{seed}": prompt(seed, 40) for seed in range(3)}
    expected = run(make(model_folder("llama")), prompts, max_tokens=40)
    core = make(
        model_folder("llama"),
        swap_space=0.01,
        enable_sleep_mode=True,
        async_scheduling=async_scheduling,
    )
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    for request_id, token_ids in prompts.items():
        core.add_request(message(request_id, token_ids, max_tokens=40))
    deltas = [delta for _ in range(15) for delta in core.step()]
    deltas += core.sleep(1)
    assert connector_of(core).num_swapped == 3
    core.wake_up()
    steps = core.scheduler.num_steps
    while core.has_work:
        deltas += core.step()
    for delta in deltas:
        tokens[delta.request_id] += delta.token_ids
    assert tokens == expected
    assert core.scheduler.num_steps - steps < 35, "nothing is computed again"
    core.check_integrity()


def test_two_tenants_with_equal_prompts_share_no_block(model_folder: Folder) -> None:
    core = make(model_folder("llama"), kv_offloading_size=0.01)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts, tenant="one", cache_namespace="1" * 32)
    forget_kv_cache(core)
    assert run(core, prompts, tenant="two", cache_namespace="2" * 32) == expected
    assert connector_of(core).num_matched_tokens == 0
    assert connector_of(core).num_saved_blocks == 8


def test_after_a_reset_no_earlier_block_is_loaded(model_folder: Folder) -> None:
    core = make(model_folder("llama"), kv_offloading_size=0.01)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    assert core.reset_prefix_cache()
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens == 0


def test_a_waiting_beam_that_gets_other_tokens_is_looked_up_again(model_folder: Folder) -> None:
    core = make(model_folder("llama"), kv_offloading_size=0.01)
    run(core, {"a": prompt(1, 70)})
    beam = core.add_request(message("beam", prompt(1, 70))).sequences[0]
    connector = connector_of(core)
    assert connector.get_num_new_matched_tokens(beam, 0) == (64, False)
    beam.token_ids, beam.block_hashes = prompt(2, 70), BlockHashes()
    assert connector.get_num_new_matched_tokens(beam, 0) == (0, False)


def test_host_memory_stays_within_its_budget(model_folder: Folder) -> None:
    core = make(model_folder("llama"), kv_offloading_size=0.0001)
    host = connector_of(core).host
    for seed in range(20):
        run(core, {"a": prompt(seed, 70)})
        assert 0 < host.used_bytes <= host.capacity
        assert host.used_bytes == sum(block.nbytes for block, _ in host._blocks.values())


def test_tokens_that_a_larger_tier_would_have_loaded_are_counted(model_folder: Folder) -> None:
    core = make(model_folder("llama"), kv_offloading_size=0.0001)
    connector = connector_of(core)
    size = connector._buffers.block_bytes
    num_fitting = connector.host.capacity // size
    assert num_fitting >= 4
    prompts = [{"a": prompt(seed, 70)} for seed in range(num_fitting // 4 + 1)]
    for one_prompt in prompts:  # 4 blocks of each
        run(core, one_prompt)
    assert connector.num_evicted_tokens == 0
    forget_kv_cache(core)
    run(core, prompts[0])
    loaded, evicted = connector.num_matched_tokens, connector.num_evicted_tokens
    assert evicted
    assert loaded + evicted == 64
    for seed in range(100, 100 + GHOST_FACTOR * (num_fitting // 4 + 1)):
        run(core, {"a": prompt(seed, 70)})
    forget_kv_cache(core)
    run(core, prompts[0])
    assert connector.num_evicted_tokens == evicted  # so large a tier is no upper bound of use
    assert len(connector._history) * size <= GHOST_FACTOR * connector.host.capacity


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", ["flip", "truncate", "exchange"])
def test_blocks_that_have_changed_in_host_memory_are_computed_and_counted(
    model_folder: Folder, kind: str, async_scheduling: bool
) -> None:
    folder, settings = model_folder("llama"), {"async_scheduling": async_scheduling}
    core = make(folder, kv_offloading_size=0.01, **settings)
    prompts = {"a": prompt(1, 70), "b": prompt(2, 50), "c": prompt(3, 40)}
    expected = run(make(folder, **settings), prompts)
    assert run(core, prompts) == expected
    forget_kv_cache(core)
    host = connector_of(core).host
    one, two = random.Random(kind).sample(list(host._blocks), 2)
    payload, checksum = host._blocks[one]
    if kind == "flip":
        payload[-1] ^= 1
    elif kind == "truncate":
        host._blocks[one] = payload[:-1], checksum
    else:
        host._blocks[one], host._blocks[two] = host._blocks[two], host._blocks[one]
    assert run(core, prompts) == expected
    assert core.snapshot().kv_tier_failures_total["checksum"] == (2 if kind == "exchange" else 1)
    forget_kv_cache(core)
    assert run(core, prompts) == expected
    assert connector_of(core).num_matched_tokens >= 64 + 48 + 32


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_who_shares_blocks_that_could_not_be_loaded_does_not_save_them(
    model_folder: Folder, async_scheduling: bool
) -> None:
    """Both are preempted once the step has failed, and swap space takes preempted ones' blocks."""
    folder, shared = model_folder("llama"), prompt(1, 64)
    settings = {"async_scheduling": async_scheduling}
    core = make(folder, kv_offloading_size=0.01, swap_space=0.01, **settings)
    prompts = {"a": [*shared, *prompt(2, 20)], "b": [*shared, *prompt(3, 20)]}
    expected = run(make(folder, **settings), prompts)
    run(core, {"a": prompts["a"]})
    forget_kv_cache(core)
    for payload, _ in connector_of(core).host._blocks.values():
        payload ^= 85
    for _ in range(2):
        assert run(core, prompts) == expected
        forget_kv_cache(core)
    assert core.snapshot().kv_tier_failures_total["checksum"]


def test_a_block_that_has_changed_fails_no_step_of_a_launchers_process(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process ends with a step that fails, and the others with it."""
    launched = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    settings: Any = {"distributed_executor_backend": "external_launcher"}
    core = make(model_folder("llama"), kv_offloading_size=0.01, **settings)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    forget_kv_cache(core)
    next(iter(connector_of(core).host._blocks.values()))[0][17] ^= 4
    assert run(core, prompts) == expected
    assert core.snapshot().kv_tier_failures_total == {"checksum": 1}


def test_a_failed_step_leaves_no_block_that_was_never_loaded(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(model_folder("llama"), kv_offloading_size=0.01)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    forget_kv_cache(core)
    buffers = connector_of(core)._buffers
    write = buffers.write_verified

    def fail(*args: Any) -> None:
        monkeypatch.setattr(buffers, "write_verified", write)
        raise OSError("no memory")

    monkeypatch.setattr(buffers, "write_verified", fail)
    assert run(core, prompts) == expected
    assert run(core, prompts) == expected


def test_a_model_whose_blocks_cannot_be_saved_refuses_offloading_and_does_without_swap(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "caches_prefixes", False)
    with pytest.raises(ConfigError, match="caches no prefixes") as refusal:
        make(model_folder("llama"), kv_offloading_size=0.01)
    assert refusal.value.param == "kv_offloading_size"
    assert make(model_folder("llama"), swap_space=0.01).scheduler.kv_connector is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"preemption_mode": "swap"}, "preemption_mode"),
        ({"kv_offloading_backend": "/tmp/x"}, "kv_offloading_backend"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "kv_offloading_size"),
        ({"kv_transfer_config": {"kv_role": "x"}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_connector": "Other"}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"other": 1}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_load_failure_policy": "other"}}, "kv_transfer_config"),
        ({"swap_space": -1}, "swap_space"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(model="m", **changes)
    assert refusal.value.param == param


def test_a_connector_of_another_package_saves_and_loads(model_folder: Folder) -> None:
    config = {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": "tests.engine.kv_transfer.outside",
        "kv_role": "kv_both",
    }
    core = make(model_folder("llama"), kv_transfer_config=config)
    connector = core.scheduler.kv_connector
    assert isinstance(connector, DictConnector)
    assert (connector.role, connector.num_layers) == ("kv_both", 3)
    prompts = {"a": prompt(1, 70), "b": prompt(2, 33)}
    expected = run(core, prompts)
    assert len(connector.blocks) == 4 + 2
    forget_kv_cache(core)
    load, loaded = connector.start_load_kv, []
    connector.start_load_kv = lambda: (loaded.extend(connector._metadata.loads), load())  # type: ignore
    assert run(core, prompts) == expected
    assert len(loaded) == 4 + 2
    assert connector.finished == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("LMCacheConnectorV1", "lmcache"),
        ("MooncakeConnector", "mooncake"),
    ],
)
def test_a_connector_of_vllms_runs_from_its_package_or_names_it(
    model_folder: Folder,
    name: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package is a stand-in, with a class that keeps to Quire's interface."""
    config = {"kv_connector": name, "kv_role": "kv_both"}
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}, which") as refusal:
        make(model_folder("llama"), kv_transfer_config=config)
    assert refusal.value.param == "kv_transfer_config"
    monkeypatch.undo()
    module, class_name = PACKAGED_CONNECTORS[name]
    file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    source = "tests.engine.kv_transfer.outside"
    file.write_text(f"from {source} import DictConnector as {class_name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    core = make(model_folder("llama"), kv_transfer_config=config)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    forget_kv_cache(core)
    assert run(core, prompts) == expected
    assert len(core.scheduler.kv_connector.blocks) == 4  # type: ignore[union-attr]
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == package]:
        del sys.modules[loaded]


def test_a_package_that_is_there_is_not_said_to_be_missing(model_folder: Folder) -> None:
    config = {"kv_connector": "X", "kv_connector_module_path": "tests.engine.kv_transfer.mistyped"}
    with pytest.raises(ConfigError, match="can't be imported: No module"):
        make(model_folder("llama"), kv_transfer_config=config)


@pytest.mark.parametrize("name", ["NoConnector", "Missing"])
def test_what_is_no_connector_is_refused(model_folder: Folder, name: str) -> None:
    module = "tests.engine.kv_transfer.outside"
    config = {"kv_connector": name, "kv_connector_module_path": module}
    with pytest.raises(ConfigError, match=name) as refusal:
        make(model_folder("llama"), kv_transfer_config=config)
    assert refusal.value.param == "kv_transfer_config"


def test_a_device_whose_prompts_start_with_no_cached_block_loads_none(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "caches_prefixes", False)
    config = {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": "tests.engine.kv_transfer.outside",
        "kv_role": "kv_both",
    }
    assert make(model_folder("llama"), swap_space=0.01).scheduler.kv_connector is None
    for settings in ({"kv_transfer_config": config}, {"kv_offloading_size": 0.01}):
        with pytest.raises(ConfigError, match="the device cpu caches no prefixes"):
            make(model_folder("llama"), **settings)
