"""An engine with a disk tier: warm after SIGKILL, right tokens whatever happens to the folder."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.kv_transfer.storage_queue import NUM_READERS
from tests.engine.kv_transfer.test_disk_tier import segments
from tests.engine.kv_transfer.test_offloading import (
    Folder,
    connector_of,
    forget_kv_cache,
    make,
    message,
    prompt,
    run,
)
from tests.engine.models import make_model


def on_disk(folder: Path, tier: Path, **settings: Any) -> EngineCore:
    return make(folder, kv_offloading_size=0.01, kv_offloading_backend=str(tier), **settings)


def flush(core: EngineCore) -> None:
    storage = connector_of(core).storage
    assert storage is not None
    storage.flush()


def failures(core: EngineCore) -> dict[str, int]:
    storage = connector_of(core).storage
    assert storage is not None
    return dict(storage.tier.failures)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_next_process_reads_what_this_one_has_written(
    model_folder: Folder, tmp_path: Path, async_scheduling: bool
) -> None:
    folder, prompts = model_folder("llama"), {"a": prompt(1, 70), "b": prompt(2, 100)}
    core = on_disk(folder, tmp_path, async_scheduling=async_scheduling)
    expected = run(core, prompts)
    core.shutdown()
    restarted = on_disk(folder, tmp_path, async_scheduling=async_scheduling)
    assert run(restarted, prompts) == expected
    assert connector_of(restarted).num_matched_tokens == 64 + 96
    assert restarted.snapshot().kv_tier_hit_tokens_total == {"disk": 64 + 96}
    assert not failures(restarted)
    blocks = restarted.scheduler.kv.pool.blocks
    [cached_hash, *_] = [block.block_hash for block in blocks if block.block_hash]
    assert connector_of(restarted).find_tier(cached_hash) == "disk"
    assert connector_of(restarted).find_tier(bytes(32)) == ""
    restarted.shutdown()


def test_a_prompt_waits_for_the_disk_while_others_run(model_folder: Folder, tmp_path: Path) -> None:
    core = on_disk(model_folder("llama"), tmp_path)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    flush(core)
    forget_kv_cache(core)
    connector = connector_of(core)
    connector.host.clear()
    assert connector.storage is not None
    proceed = threading.Event()
    for _ in range(NUM_READERS):
        connector.storage._readers.submit(proceed.wait)
    for request_id in ("a", "aborted"):
        core.add_request(
            EngineRequest(
                request_id=request_id,
                gateway_id="g",
                prompt_token_ids=prompts["a"],
                sampling=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
            )
        )
    assert core.snapshot().num_requests_waiting == 2
    assert run(core, {"b": prompt(2, 20)}, until="b")["b"]
    core.abort("aborted")
    assert core.snapshot().num_requests_waiting == 1
    proceed.set()
    assert run(core, {"a": []}) == expected
    assert connector.num_matched_tokens == 64
    core.shutdown()


def test_a_read_that_hangs_keeps_no_other_request_and_later_ones_do_without(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = on_disk(model_folder("llama"), tmp_path)
    prompts = {"a": prompt(1, 70), "b": prompt(2, 70)}
    expected = run(core, prompts)
    flush(core)
    connector = connector_of(core)
    storage = connector.storage
    assert storage is not None
    monkeypatch.setattr("engine.kv_transfer.storage_queue.READ_TIMEOUT_S", 600.0)
    proceed, read = threading.Event(), storage.tier.read

    def hang(key: bytes, namespace: str, tenant: str) -> Any:
        if namespace == "hangs":
            proceed.wait()
        return read(key, namespace, tenant)

    monkeypatch.setattr(storage.tier, "read", hang)
    monkeypatch.setattr(storage.tier, "may_contain", lambda key: True)
    forget_kv_cache(core)
    connector.host.clear()
    core.add_request(message("hanging", prompt(3, 70), cache_namespace="hangs"))
    assert core.snapshot().num_requests_waiting == 1
    assert run(core, {"a": prompts["a"]}, until="a")["a"] == expected["a"]
    assert connector.num_matched_tokens == 64
    assert not storage.hangs
    monkeypatch.setattr("engine.kv_transfer.storage_queue.READ_TIMEOUT_S", 0.0)
    assert storage.hangs
    assert run(core, {"b": prompts["b"]}, until="b")["b"] == expected["b"]
    assert connector.num_matched_tokens == 64
    core.abort("hanging")
    proceed.set()
    core.shutdown()


def test_looking_for_other_replicas_blocks_takes_one_reader_alone_where_it_hangs(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = on_disk(model_folder("llama"), tmp_path)
    prompts = {str(seed): prompt(seed, 70) for seed in range(NUM_READERS + 1)}
    expected = run(core, prompts)
    flush(core)
    connector = connector_of(core)
    storage = connector.storage
    assert storage is not None
    monkeypatch.setattr("engine.kv_transfer.storage_queue._REFRESH_S", -1.0)
    proceed = threading.Event()
    monkeypatch.setattr(storage.tier, "refresh", proceed.wait)
    forget_kv_cache(core)
    connector.host.clear()
    for name, tokens in prompts.items():
        assert run(core, {name: tokens})[name] == expected[name]
    assert connector.num_matched_tokens == 64 * len(prompts)
    proceed.set()
    core.shutdown()


def test_no_block_is_begun_to_be_read_after_the_time_that_computing_takes(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = on_disk(model_folder("llama"), tmp_path)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    flush(core)
    connector = connector_of(core)
    assert connector.storage is not None
    forget_kv_cache(core)
    connector.host.clear()
    assert connector._read_ahead is not None
    connector._read_ahead.compute_s = 0.0
    monkeypatch.setattr("engine.kv_transfer.read_ahead._MIN_READ_S", -1.0)
    assert run(core, prompts) == expected
    assert connector.num_matched_tokens == 0
    assert failures(core) == {"late": 1}
    core.shutdown()


@pytest.mark.parametrize(
    ("seconds", "loaded"), [([9.0, 1e-6, 9.0], 64), ([9.0, 9.0, 9.0], 0)], ids=["once", "always"]
)
def test_blocks_are_read_unless_reading_is_always_slower_than_computing(
    model_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: list[float],
    loaded: int,
) -> None:
    core = on_disk(model_folder("llama"), tmp_path)
    prompts = {"a": prompt(1, 70)}
    expected = run(core, prompts)
    flush(core)
    connector = connector_of(core)
    assert connector.storage is not None
    forget_kv_cache(core)
    connector.host.clear()
    times = iter(seconds)
    monkeypatch.setattr(connector.storage.tier, "measure_read", lambda: next(times))
    connector.set_prefill_pace(0.05)
    assert run(core, prompts) == expected
    assert connector.num_matched_tokens == loaded
    core.shutdown()


def test_a_model_of_other_weights_or_numbers_finds_nothing(
    model_folder: Folder, tmp_path: Path
) -> None:
    prompts = {"a": prompt(1, 70)}
    first = on_disk(model_folder("llama"), tmp_path)
    run(first, prompts)
    first.shutdown()
    for family, settings in (
        ("qwen2", {}),
        ("llama", {"kv_cache_dtype": "bfloat16"}),
        ("llama", {"block_size": 8}),
        ("llama", {"cpu_kernels": False}),
        ("llama", {"rope_theta": 5000.0}),
    ):
        expected = run(make(model_folder(family), **settings), prompts)
        core = on_disk(model_folder(family), tmp_path, **settings)
        assert run(core, prompts) == expected
        assert connector_of(core).num_matched_tokens == 0
        core.shutdown()


def test_after_a_sleep_other_weights_find_no_earlier_block(
    model_folder: Folder, tmp_path: Path
) -> None:
    prompts = {"a": prompt(1, 70)}
    folder = make_model("llama", tmp_path / "model")
    core = on_disk(folder, tmp_path / "tier", enable_sleep_mode=True)
    run(core, prompts)
    flush(core)
    core.sleep(2)
    make_model("llama", folder, seed=1)
    core.wake_up()
    assert run(core, prompts) == run(make(folder), prompts)
    assert connector_of(core).num_matched_tokens == 0
    core.shutdown()


def test_a_prefix_in_use_is_written_again_after_its_segments_were_deleted(
    model_folder: Folder, tmp_path: Path
) -> None:
    prompts = {"a": prompt(1, 70)}
    core = on_disk(model_folder("llama"), tmp_path)
    expected = run(core, prompts)
    flush(core)
    for path in segments(tmp_path):
        path.unlink()
    storage = connector_of(core).storage
    assert storage is not None
    storage.tier.refresh()
    assert run(core, prompts) == expected
    core.shutdown()
    restarted = on_disk(model_folder("llama"), tmp_path)
    assert run(restarted, prompts) == expected
    assert connector_of(restarted).num_matched_tokens == 64
    restarted.shutdown()


def test_two_tenants_share_a_folder_but_no_block(model_folder: Folder, tmp_path: Path) -> None:
    prompts = {"a": prompt(1, 70)}
    core = on_disk(model_folder("llama"), tmp_path)
    expected = run(core, prompts, tenant="one", cache_namespace="1" * 32)
    core.shutdown()
    restarted = on_disk(model_folder("llama"), tmp_path)
    assert run(restarted, prompts, tenant="two", cache_namespace="2" * 32) == expected
    assert connector_of(restarted).num_matched_tokens == 0
    assert run(restarted, prompts, tenant="one", cache_namespace="1" * 32) == expected
    assert connector_of(restarted).num_matched_tokens == 64
    restarted.shutdown()


def test_after_any_fault_of_the_folder_tokens_are_right(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder, prompts = model_folder("llama"), {str(seed): prompt(seed, 90) for seed in range(4)}
    core = on_disk(folder, tmp_path)
    expected = run(core, prompts)
    core.shutdown()
    pristine = {path: path.read_bytes() for path in sorted(segments(tmp_path))}
    random_ = random.Random(3)
    for _ in range(12):
        for path, content in pristine.items():
            data, end = bytearray(content), len(content.rstrip(b"\0"))
            for _ in range(random_.randrange(1, 4)):
                data[random_.randrange(end)] ^= 1 << random_.randrange(8)
            path.write_bytes(data)
        core = on_disk(folder, tmp_path)
        assert run(core, prompts) == expected
        assert connector_of(core).num_matched_tokens <= 4 * 80
        core.shutdown()
        for other in segments(tmp_path):
            other.unlink()


WRITER = """
import sys
from engine.contract.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
core = EngineCore(EngineConfig(
    model=sys.argv[1], kv_offloading_backend=sys.argv[2], kv_offloading_size=0.01,
    num_gpu_blocks_override=64, max_model_len=256,
))
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompt = [int(word) for word in sys.argv[3].split()]
core.add_request(EngineRequest(
    request_id="a", gateway_id="g", prompt_token_ids=prompt, sampling=sampling))
while core.has_work:
    core.step()
core.scheduler.kv_connector.storage.flush()
print("written", flush=True)
while True:  # writes on until it is killed
    prompt = prompt[1:] + prompt[:1]
    core.add_request(EngineRequest(
        request_id="a", gateway_id="g", prompt_token_ids=prompt, sampling=sampling))
    while core.has_work:
        core.step()
"""


def test_after_sigkill_the_cache_is_warm(model_folder: Folder, tmp_path: Path) -> None:
    folder, token_ids = model_folder("llama"), prompt(1, 70)
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
