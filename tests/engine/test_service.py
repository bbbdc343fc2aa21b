"""A replica as a process, over a real Redis: requests, aborts, errors, drain, kill."""

from __future__ import annotations

import gc
import json
import os
import queue
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis
import torch

from engine import LLM, SamplingParams
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.engine_config import EngineConfig
from engine.contract.lora import AdapterRef
from engine.contract.messages import ControlRequest
from engine.core.engine_core import EngineCore
from engine.core.profiler import MAX_STEPS
from engine.serving import service
from tests.engine.replica import Gateway, replica

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def served(
    redis_url: str, model_folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gateway, subprocess.Popen[bytes]]]:
    """One replica for the tests of this module that don't harm it."""
    prefix = f"svc{time.time_ns()}"
    flag = "--enable-sleep-mode"
    with replica(redis_url, prefix, model_folder("llama"), flag) as process:
        gateway = Gateway(redis_url, prefix)
        gateway.await_state("ready")
        yield gateway, process


@pytest.fixture
def gateway(served: tuple[Gateway, subprocess.Popen[bytes]]) -> Gateway:
    return served[0]


def test_a_request_of_a_later_release_is_refused_in_a_sentence(gateway: Gateway) -> None:
    """It was dropped, and its gateway waited for ever."""
    request = {
        "type": "request",
        "request_id": "later",
        "gateway_id": "g1",
        "prompt_token_ids": [1, 2],
        "sampling": {"n": 2, "of_a_later_release": 1},
        "message_version": 2,
    }
    key = redis_keys.inbox_key(gateway.replica_id, gateway.prefix)
    gateway.redis.xadd(key, {protocol.STREAM_FIELD: msgspec.msgpack.encode(request)})
    gateway.wait(lambda: len(gateway.deltas.get("later", [])) == 2, timeout=60)
    deltas = gateway.deltas["later"]
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "error"), (1, "error")]
    assert all(delta.error and delta.error.code == "unreadable_request" for delta in deltas)
    assert deltas[0].error is not None
    assert "unknown field `of_a_later_release`" in deltas[0].error.message
    settled(gateway)


def settled(gateway: Gateway) -> None:
    """Nothing is pending, and the pool's books balance."""
    gateway.wait(lambda: gateway.pending() == 0)
    reply = gateway.control("check_integrity")
    assert reply.ok, reply.detail


def test_tokens_are_the_offline_engines(gateway: Gateway, model_folder: Folder) -> None:
    prompts = [[5, 6, 7], [9] * 40, [11, 12]]
    for index, prompt in enumerate(prompts):
        gateway.request(f"eq{index}", prompt)
    gateway.finish("eq0", "eq1", "eq2")
    llm = LLM(str(model_folder("llama")), num_gpu_blocks_override=64, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    offline = llm.generate(prompts, params, use_tqdm=False)
    assert [gateway.tokens(f"eq{i}") for i in range(3)] == [
        output.outputs[0].token_ids for output in offline
    ]
    settled(gateway)


def test_one_outbox_entry_a_step_holds_all_of_a_gateways_tokens(gateway: Gateway) -> None:
    gateway.read(block_ms=1)
    initial_count = len(gateway.steps)
    for index in range(8):
        gateway.request(f"many{index}", [20 + index, 21], max_tokens=200)
    gateway.finish(*(f"many{i}" for i in range(8)))
    steps = gateway.steps[initial_count:]
    assert len(steps) == len(set(steps))
    # 1600 tokens; requests that run side by side share their entries.
    assert len(steps) < 1200
    settled(gateway)


def test_an_entry_is_acknowledged_only_after_the_last_output(gateway: Gateway) -> None:
    paused_id = gateway.hold("ack", [5, 6])
    assert gateway.pending() == 1
    gateway.control("resume")
    gateway.finish(paused_id)
    settled(gateway)
    assert gateway.redis.xlen(redis_keys.inbox_key("r1", gateway.prefix)) == 0


def test_fault_25_an_abort_ends_a_request_and_frees_its_blocks(gateway: Gateway) -> None:
    paused_id = gateway.hold("gone", [5, 6])
    gateway.abort(paused_id)
    gateway.control("resume")
    gateway.finish(paused_id)
    assert gateway.deltas[paused_id][-1].finish_reason == "abort"
    assert len(gateway.tokens(paused_id)) < 240
    settled(gateway)


@pytest.mark.parametrize(("busy", "num_used"), [(True, 1), (False, 5)])
def test_fault_53_what_runs_gets_its_tokens_between_thousands_of_messages(
    monkeypatch: pytest.MonkeyPatch, *, busy: bool, num_used: int
) -> None:
    monkeypatch.setattr(service, "MESSAGE_BUDGET_S", 0.0)
    messages: queue.SimpleQueue[tuple[bytes, str]] = queue.SimpleQueue()
    for number in range(5):
        messages.put((b"%d" % number, "message"))
    handled: list[bytes] = []
    replica: Any = SimpleNamespace(
        _reader=SimpleNamespace(messages=messages),
        _handle=lambda core, entry_id, message: handled.append(entry_id),
    )
    core: Any = SimpleNamespace(has_work=busy)
    service.EngineService._handle_messages(replica, core, wait=False)
    assert handled == [b"%d" % number for number in range(num_used)]
    core.has_work = False
    service.EngineService._handle_messages(replica, core, wait=False)
    assert len(handled) == 5


def test_an_abort_of_nothing_does_nothing(gateway: Gateway) -> None:
    gateway.abort("never-there")
    settled(gateway)


def test_a_refused_request_gets_its_typed_error(gateway: Gateway) -> None:
    gateway.request("bad", [5] * 5, max_tokens=1000)
    gateway.finish("bad")
    error = gateway.deltas["bad"][-1].error
    assert error is not None
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
    settled(gateway)


def test_fault_28_a_duplicate_delivery_runs_once(gateway: Gateway) -> None:
    gateway.request("twice", [5, 6, 7], max_tokens=20)
    gateway.request("twice", [5, 6, 7], max_tokens=20)
    gateway.finish("twice")
    settled(gateway)
    gateway.request("twice", [5, 6, 7], max_tokens=20)
    settled(gateway)
    gateway.read(block_ms=200)
    assert len(gateway.tokens("twice")) == 20


def test_a_duplicate_of_a_request_whose_times_are_still_computed_is_dropped() -> None:
    """It has left the core by then, and its answer is yet to come."""
    replica: Any = SimpleNamespace(
        _gateways={"aligned": "g1"},
        _recent={},
        _output=SimpleNamespace(done=[]),
        config=SimpleNamespace(name="whisper"),
    )
    core: Any = SimpleNamespace(requests={})
    message: Any = SimpleNamespace(request_id="aligned", tenant="acme", gateway_id="g1")
    service.EngineService._add(replica, core, b"1-0", message)
    assert replica._output.done == [b"1-0"]


def test_bytes_that_are_no_message_are_deleted_and_harm_nobody(gateway: Gateway) -> None:
    key = redis_keys.inbox_key("r1", gateway.prefix)
    gateway.redis.xadd(key, {protocol.STREAM_FIELD: b"\xc1\x00garbage"})
    gateway.redis.xadd(key, {b"other": b"field"})
    gateway.request("after", [5])
    gateway.finish("after")
    settled(gateway)
    assert gateway.redis.xlen(key) == 0


def test_the_prefix_cache_is_reset_on_an_operators_word(gateway: Gateway) -> None:
    prompt = list(range(30, 80))
    gateway.request("cold", prompt)
    gateway.request("warm", prompt)
    gateway.finish("cold", "warm")
    assert gateway.deltas["warm"][-1].num_cached_tokens == 48
    assert gateway.control("reset_prefix_cache").ok
    gateway.request("again", prompt)
    gateway.finish("again")
    assert gateway.deltas["again"][-1].num_cached_tokens == 0
    assert not gateway.control("no-such-command").ok


@pytest.mark.parametrize("level", [1, 2])
def test_a_replica_sleeps_and_goes_on_with_its_requests(gateway: Gateway, level: int) -> None:
    gateway.request(f"expected{level}", [7, 8, 9], max_tokens=240)
    gateway.finish(f"expected{level}")
    paused = gateway.hold(f"paused{level}", [7, 8, 9])
    assert gateway.control("sleep", level=level).ok
    assert gateway.await_state("sleeping").stats.num_free_blocks == 64
    assert not gateway.is_finished(paused)
    gateway.request(f"refused{level}", [5])
    gateway.finish(f"refused{level}")
    error = gateway.deltas[f"refused{level}"][-1].error
    assert error is not None
    assert (error.status, error.code) == (503, "engine_sleeping")
    assert gateway.control("wake_up", tags=["weights"]).ok
    gateway.await_state("sleeping")
    assert gateway.control("wake_up").ok
    assert gateway.control("resume").ok
    gateway.await_state("ready")
    gateway.finish(paused)
    assert gateway.tokens(paused) == gateway.tokens(f"expected{level}")
    assert not gateway.control("sleep", level=9).ok
    assert gateway.await_state("ready").state == "ready"
    settled(gateway)


def test_the_heartbeat_tells_model_load_and_progress(gateway: Gateway) -> None:
    heartbeat = gateway.await_state("ready")
    assert heartbeat.model.max_model_len == 256
    assert heartbeat.model.kv_capacity_tokens == 64 * 16
    assert heartbeat.model.eos_token_ids == [2]
    assert heartbeat.stats.num_blocks == 64
    later = heartbeat
    deadline = time.monotonic() + 60
    while later.progress_at <= heartbeat.progress_at and time.monotonic() < deadline:
        time.sleep(0.1)
        later = gateway.await_state("ready")
    # An idle engine comes round, too.
    assert later.progress_at > heartbeat.progress_at


#: What a test of a killed replica has: see `reborn`.
Reborn = tuple[Gateway, subprocess.Popen[bytes], protocol.Heartbeat]


@pytest.fixture(scope="module")
def reborn(redis_url: str, model_folder: Folder) -> Iterator[Reborn]:
    """A replica that was killed in the middle of "cut", as it's there again, and the last word of
    the first process.
    """
    prefix = f"reborn{time.time_ns()}"
    gateway = Gateway(redis_url, prefix)
    with replica(redis_url, prefix, model_folder("llama")) as process:
        first = gateway.await_state("ready")
        gateway.request("cut", [5, 6], max_tokens=250)
        gateway.wait(lambda: len(gateway.tokens("cut")) > 3)
        process.kill()
        process.wait(60)
    assert gateway.pending() == 1
    gateway.redis.delete(redis_keys.replica_key("r1", prefix))
    with replica(redis_url, prefix, model_folder("llama")) as process:
        gateway.await_state("ready")
        yield gateway, process, first


def test_fault_27_after_sigkill_a_new_incarnation_starts_clean(reborn: Reborn) -> None:
    gateway, _, first = reborn
    have = gateway.tokens("cut")
    assert gateway.await_state("ready").incarnation != first.incarnation
    gateway.wait(lambda: gateway.pending() == 0)
    gateway.send(
        protocol.EngineRequest(
            request_id="cut",
            gateway_id="g1",
            prompt_token_ids=[5, 6],
            sampling=SamplingParams(temperature=0, max_tokens=250, ignore_eos=True),
            resume_token_ids=[have],
        )
    )
    gateway.request("whole", [5, 6], max_tokens=250)
    gateway.finish("cut", "whole")
    assert gateway.tokens("cut") == gateway.tokens("whole")
    settled(gateway)


def test_sigterm_finishes_what_runs_and_takes_nothing_new(reborn: Reborn) -> None:
    """The last test of this replica."""
    gateway, process, _ = reborn
    gateway.request("long", [5, 6], max_tokens=250)
    gateway.wait(lambda: len(gateway.tokens("long")) > 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    gateway.finish("long")
    assert gateway.deltas["long"][-1].finish_reason == "length"
    assert len(gateway.tokens("long")) == 250
    assert gateway.heartbeat() is None


def test_a_model_that_cannot_be_loaded_says_why_and_ends(
    redis_url: str, key_prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with replica(redis_url, key_prefix, tmp_path, "--skip-tokenizer-init") as process:
        assert process.wait(120) == 1
        heartbeat = Gateway(redis_url, key_prefix).heartbeat()
    assert heartbeat is not None
    assert heartbeat.state == "failed"
    assert "architecture" in heartbeat.detail


def test_a_replica_that_plans_ahead_serves_the_same_and_searches(
    redis_url: str, key_prefix: str, gateway: Gateway, model_folder: Folder
) -> None:
    prompt = list(range(30, 60))
    kinds = {
        "plain": {"max_tokens": 20},
        "drawn": {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 20},
        "beams": {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 10},
    }
    with replica(redis_url, key_prefix, model_folder("llama"), "--async-scheduling") as process:
        ahead = Gateway(redis_url, key_prefix)
        ahead.await_state("ready")
        for name, sampling in kinds.items():
            ahead.request(f"a-{name}", prompt, **sampling)
            gateway.request(f"a-{name}", prompt, **sampling)
        ahead.finish(*(f"a-{name}" for name in kinds))
        gateway.finish(*(f"a-{name}" for name in kinds))
        settled(ahead)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    for name in kinds:
        tokens_by_index = [{d.index: [] for d in g.deltas[f"a-{name}"]} for g in (ahead, gateway)]
        for by_index, reader in zip(tokens_by_index, (ahead, gateway), strict=True):
            for delta in reader.deltas[f"a-{name}"]:
                by_index[delta.index] += delta.token_ids
        assert tokens_by_index[0] == tokens_by_index[1]
    assert [d.finish_reason for d in gateway.deltas["a-beams"]] == ["length", "length"]


#: An adapter whose folder isn't there, and one that can't be one.
MISSING = AdapterRef(digest="f" * 64, name="missing", path="/nowhere/at/all")
MALFORMED = AdapterRef(digest="../x", name="malformed", path="/nowhere/at/all")
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("sleep", {"level": 1}),
    ("sleep", {"level": 9}),
    ("wake_up", {"tags": ["wights"]}),
    ("pause", {"mode": "soon"}),
    ("load_adapter", {}),
    ("load_adapter", {"adapter": MALFORMED, "pin": True}),
    ("load_adapter", {"adapter": MISSING, "pin": True}),
    ("unload_adapter", {"adapter": MISSING}),
    ("stop_profile", {}),
    ("no-such-command", {}),
]


def test_fault_66_a_refused_command_changes_nothing_of_the_process(
    redis_url: str, model_folder: Folder
) -> None:
    prefix = f"refused{time.time_ns()}"
    with replica(redis_url, prefix, model_folder("llama")) as process:
        gateway = Gateway(redis_url, prefix)
        gateway.await_state("ready")
        gateway.request("before", [5, 6])
        gateway.finish("before")
        proc = Path(f"/proc/{process.pid}")
        threads = len(os.listdir(proc / "task"))
        resident: list[int] = []
        for _ in range(10):
            for command, details in REFUSED:
                assert not gateway.control(command, **details).ok, command
            resident.append(int((proc / "statm").read_text().split()[1]))
        assert max(resident) - resident[0] < (8 << 20) // os.sysconf("SC_PAGE_SIZE")
        assert len(os.listdir(proc / "task")) == threads
        assert gateway.await_state("ready").adapters == []
        gateway.request("after", [5, 6])
        gateway.finish("after")
        assert gateway.tokens("after") == gateway.tokens("before")
        settled(gateway)


Operated = Callable[..., service.EngineService]


@pytest.fixture
def operated(redis_url: str, model_folder: Folder) -> Iterator[Operated]:
    """A replica in this process that runs no loop; what it has loaded is frozen."""

    def make(**settings: Any) -> service.EngineService:
        config = EngineConfig(
            model=str(model_folder("llama")),
            num_gpu_blocks_override=64,
            max_model_len=64,
            **settings,
        )
        client = redis.Redis.from_url(redis_url)
        engine_service = service.EngineService(config, "r1", client, f"operated{time.time_ns()}")
        engine_service.core = EngineCore(config)
        gc.collect()
        gc.freeze()
        return engine_service

    yield make
    gc.unfreeze()


def operate(replica: service.EngineService, command: str, **details: Any) -> bool:
    """Give a command; whether it was done."""
    assert replica.core is not None
    replica._control(replica.core, ControlRequest(command=command, gateway_id="g1", **details))
    return replica._output.batches["g1"].replies[-1].ok


def test_fault_66_a_refused_command_leaves_the_collector_alone(
    operated: Operated,
) -> None:
    replica = operated()
    frozen, collector = gc.get_freeze_count(), (gc.isenabled(), gc.get_threshold())
    threads = threading.active_count()
    for command, details in REFUSED:
        if details.get("adapter") is not MISSING:  # it's answered by the loop
            assert not operate(replica, command, **details)
        assert gc.get_freeze_count() > 0.99 * frozen, command
        assert (gc.isenabled(), gc.get_threshold()) == collector, command
        assert threading.active_count() == threads, command


def test_what_was_loaded_is_frozen_again_after_a_sleep(
    operated: Operated,
) -> None:
    replica = operated(enable_sleep_mode=True)
    assert operate(replica, "sleep", level=2)
    assert gc.get_freeze_count() == 0
    assert operate(replica, "wake_up", tags=["weights"])
    assert gc.get_freeze_count() == 0
    assert operate(replica, "wake_up")
    assert gc.get_freeze_count() > 0


def test_fault_67_an_operators_command_asks_redis_nothing_on_the_engines_thread(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = operated(enable_sleep_mode=True)

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("Redis is asked, and may stand still.")

    monkeypatch.setattr(redis.connection.AbstractConnection, "connect", refuse)
    for command, details in (
        ("sleep", {"level": 1}),
        ("wake_up", {}),
        ("pause", {"mode": "keep"}),
        ("resume", {}),
        ("reset_prefix_cache", {}),
    ):
        assert operate(replica, command, **details), command
    assert not operate(replica, "unload_adapter", adapter=MISSING)


def test_fault_68_a_heartbeat_tells_of_an_inbox_that_is_not_read(operated: Operated) -> None:
    replica = operated()
    replica.progress_at = 1e9
    replica._reader.progress_at = 1e9 - 30
    assert replica.heartbeat().progress_at == 1e9 - 30
    replica._reader.stop()
    replica._reader.run()
    assert replica.heartbeat().progress_at == 1e9


@pytest.fixture
def no_file_space() -> Iterator[Callable[[bool], None]]:
    """Say whether this process's files are as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(is_full: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 if is_full else soft, hard))

    yield full
    full(False)


def profile_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("quire-profile-*"))


def test_fault_65_a_profile_that_cannot_be_written_is_refused_and_the_replica_lives(
    operated: Operated,
    no_file_space: Callable[[bool], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = operated()
    profiler, initial = replica._profiler, profile_folders()
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    assert not operate(replica, "start_profile")
    assert not profiler._profile.is_running
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(3):
        assert operate(replica, "start_profile")
        assert not operate(replica, "start_profile")
        torch.ones(8).sum()
        no_file_space(True)
        stopped = operate(replica, "stop_profile")
        no_file_space(False)
        assert not stopped
        assert "is lost" in replica._output.batches["g1"].replies[-1].detail
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert operate(replica, "start_profile")
    torch.ones(8).sum()
    assert operate(replica, "stop_profile")
    trace = Path(replica._output.batches["g1"].replies[-1].detail)
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert profile_folders() - initial == {*tmp_path.iterdir()}


def test_fault_65_a_profile_that_nobody_stops_ends_by_itself_on_a_full_disk(
    operated: Operated, no_file_space: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = operated()._profiler
    for is_full in (True, False):
        assert profiler.start()[0]
        torch.ones(8).sum()
        assert [profiler.step() for _ in range(MAX_STEPS - 1)] == [""] * (MAX_STEPS - 1)
        no_file_space(is_full)
        message = profiler.step()
        no_file_space(False)
        assert ("is lost" in message) == is_full
        assert not profiler._profile.is_running
    shutil.rmtree(Path(message).parent)
