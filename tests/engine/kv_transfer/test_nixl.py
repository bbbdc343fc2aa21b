"""`NixlConnector`: with a stand-in for NIXL in one process, and with the package between two."""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.contract.errors import ConfigError
from engine.contract.kv_transfer_config import KVTransferConfig
from engine.core.engine_core import EngineCore
from engine.kv_transfer import nixl_connector
from engine.kv_transfer.nixl_connector import NixlConnector
from tests.engine.kv_transfer.test_offloading import forget_kv_cache, make, message, prompt, run

Folder = Callable[[str], Path]


class StandInAgent:
    """Moves memory of this process when a transfer is asked for the first time.

    Attributes: on_read: called before; transfers: number of those that weren't released.
    """

    on_read: Callable[[], None] = staticmethod(lambda: None)
    state = "DONE"
    transfers = 0

    def __init__(self, name: str, settings: Any) -> None:
        self.name = name

    def register_memory(self, tensors: list[Any]) -> Any:
        return tensors

    def deregister_memory(self, tensors: Any) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], memory: str) -> Any:
        assert memory == "DRAM"
        return descs

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str) -> Any:
        assert operation == "READ"
        type(self).transfers += 1
        return list(zip(local, remote, strict=True))

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        type(self).on_read()
        if self.state == "DONE":
            for (to, size, _), (source, remote_size, _) in handle:
                assert size == remote_size
                ctypes.memmove(to, source, size)
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        type(self).transfers -= 1


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> type[StandInAgent]:
    kind = type("Agent", (StandInAgent,), {})
    sync = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    settings = SimpleNamespace
    module = SimpleNamespace(nixl_agent=kind, nixl_agent_config=settings, nixl_thread_sync_t=sync)
    monkeypatch.setitem(sys.modules, "nixl._api", module)  # type: ignore[arg-type]
    return kind


def nixl(role: str, **fields: Any) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role, **fields}


def connector_of(core: EngineCore) -> NixlConnector:
    connector = core.scheduler.kv_connector
    assert isinstance(connector, NixlConnector)
    return connector


@contextmanager
def two(folder: Path, **settings: Any) -> Iterator[tuple[EngineCore, EngineCore]]:
    producer = make(folder, kv_transfer_config=nixl("kv_producer"), **settings)
    consumer = make(folder, kv_transfer_config=nixl("kv_consumer"), **settings)
    try:
        yield producer, consumer
    finally:
        producer.shutdown()
        consumer.shutdown()


def compute(producer: EngineCore, prompts: dict[str, list[int]]) -> str:
    """Compute prompts for another replica; returns where it reads their blocks."""
    for name, token_ids in prompts.items():
        producer.add_request(message(name, token_ids, max_tokens=1, do_remote_decode=True))
    while producer.requests:
        producer.step()
    assert producer.kv_handover is not None
    return producer.kv_handover.address


def step_until_free(core: EngineCore) -> None:
    deadline = time.monotonic() + 60
    while core.has_work and time.monotonic() < deadline:
        core.step()
    core.check_integrity()
    assert core.scheduler.kv.pool.num_free_blocks == core.capacity.num_blocks


PROMPTS = {"a": prompt(1, 70), "b": prompt(2, 33)}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompts_blocks_are_read_and_freed_once_they_are(
    model_folder: Folder, agent: type[StandInAgent], async_scheduling: bool
) -> None:
    expected = run(make(model_folder("llama")), PROMPTS)
    with two(model_folder("llama"), async_scheduling=async_scheduling) as (producer, consumer):
        address = compute(producer, PROMPTS)
        assert producer.kv_handover is not None
        assert consumer.kv_handover is not None
        assert producer.kv_handover.key_space == consumer.kv_handover.key_space
        assert producer.scheduler.kv.pool.num_free_blocks == 64 - 5 - 3
        assert run(consumer, PROMPTS, prefilled=True, kv_peer=address) == expected
        assert connector_of(consumer).num_read_blocks == 6
        assert not consumer.snapshot().kv_tier_failures_total
        assert agent.transfers == 0
        step_until_free(producer)


def test_a_block_that_changes_while_it_is_read_is_computed(
    model_folder: Folder, agent: type[StandInAgent]
) -> None:
    one = {"a": prompt(1, 70)}  # of another, the change would come before its offer
    expected = run(make(model_folder("llama")), one)
    with two(model_folder("llama")) as (producer, consumer):
        address = compute(producer, one)
        model = producer.executor.worker.loaded.model  # type: ignore[attr-defined]
        tensors = [tensor for layer in model.kv_cache_tensors() for tensor in layer]
        agent.on_read = staticmethod(lambda: [tensor.fill_(0.5) for tensor in tensors] and None)
        assert run(consumer, one, prefilled=True, kv_peer=address) == expected
        assert consumer.snapshot().kv_tier_failures_total == {"load_error": 4}
        step_until_free(producer)


@pytest.mark.parametrize("fault", ["ERR", "gone", "lease", "reset", "namespace", "model"])
def test_what_cannot_be_read_is_computed(
    model_folder: Folder, agent: type[StandInAgent], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer fails, the other replica has ended, its lease has, it or this one has other
    weights, or the blocks are another tenant's.
    """
    expected = run(make(model_folder("llama")), PROMPTS)
    with two(model_folder("llama")) as (producer, consumer):
        if fault == "lease":
            monkeypatch.setattr(nixl_connector, "LEASE_S", 0.0)
        address, namespace = compute(producer, PROMPTS), ""
        monkeypatch.setattr(nixl_connector, "LEASE_S", 60.0)
        if fault == "ERR":
            agent.state = "ERR"
        elif fault == "gone":
            address = "tcp://127.0.0.1:1"
        elif fault == "lease":
            step_until_free(producer)
        elif fault == "reset":
            consumer.reset_prefix_cache()
            assert consumer.kv_handover is None
        elif fault == "namespace":
            namespace = "other"
        elif fault == "model":
            connector_of(consumer)._identity = b"other"
            connector_of(consumer)._make_keys()
        tokens = run(consumer, PROMPTS, prefilled=True, kv_peer=address, cache_namespace=namespace)
        assert tokens == expected
        assert connector_of(consumer).num_read_blocks == 0
        assert consumer.snapshot().kv_tier_failures_total == {"load_error": 6}
        assert agent.transfers == 0


def test_blocks_that_nobody_reads_are_free_after_their_lease(
    model_folder: Folder, agent: type[StandInAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_connector, "LEASE_S", 0.1)
    with two(model_folder("llama")) as (producer, _):
        compute(producer, PROMPTS)
        producer.add_request(message("c", prompt(3, 200), max_tokens=1, do_remote_decode=True))
        producer.step()
        producer.abort("c")
        step_until_free(producer)
        assert not connector_of(producer)._blocks


def test_prompts_that_begin_alike_are_held_for_a_reader_each(
    model_folder: Folder, agent: type[StandInAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_connector, "LEASE_S", 60.0)
    prompts = {"a": prompt(1, 70), "b": prompt(1, 48) + prompt(2, 30), "c": prompt(1, 70)}
    expected = run(make(model_folder("llama")), prompts)
    with two(model_folder("llama")) as (producer, consumer):
        address, leases = compute(producer, prompts), connector_of(producer)._leases
        for num_remaining, name in zip((2, 1, 0), prompts, strict=True):
            one = {name: prompts[name]}
            assert run(consumer, one, prefilled=True, kv_peer=address) == {name: expected[name]}
            forget_kv_cache(consumer)
            deadline = time.monotonic() + 60
            while len(leases) > num_remaining and time.monotonic() < deadline:
                producer.step()
        assert connector_of(consumer).num_read_blocks == 12
        step_until_free(producer)


def test_an_error_of_accepting_readers_ends_no_server(
    model_folder: Folder, agent: type[StandInAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, accept = [OSError("too many open files")], socket.socket.accept

    def fail_once(server: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(server)

    with two(model_folder("llama")) as (producer, consumer):
        monkeypatch.setattr(socket.socket, "accept", fail_once)
        for name, token_ids in PROMPTS.items():
            address = compute(producer, {name: token_ids})
            run(consumer, {name: token_ids}, prefilled=True, kv_peer=address)
        assert not errors
        assert connector_of(consumer).num_read_blocks == 6


@pytest.mark.parametrize(
    "values", [{"host": 1}, {"port": "1"}, {"backends": "UCX"}, {"side_channel": 1}]
)
def test_settings_that_are_wrong_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))) as refusal:
        KVTransferConfig.from_mapping(nixl("kv_both", kv_connector_extra_config=values))
    assert refusal.value.param == "kv_transfer_config"


def test_without_the_package_it_is_refused_by_name(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match="needs the package nixl, which") as refusal:
        make(model_folder("llama"), kv_transfer_config=nixl("kv_both"))
    assert refusal.value.param == "kv_transfer_config"


def test_backends_that_the_package_has_not_are_refused_by_name(
    model_folder: Folder, agent: type[StandInAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: StandInAgent, name: str, settings: Any) -> None:
        raise RuntimeError("NIXL_ERR_NOT_FOUND")

    monkeypatch.setattr(agent, "__init__", refuse)
    config = nixl("kv_both", kv_connector_extra_config={"backends": ["TELEX"]})
    with pytest.raises(ConfigError, match=r"TELEX.*NOT_FOUND") as refusal:
        make(model_folder("llama"), kv_transfer_config=config)
    assert refusal.value.param == "kv_transfer_config"


def _produce(folder: Path, pipe: Connection) -> None:
    """Compute prompts until the pipe is closed, in a process of its own."""
    producer = make(folder, kv_transfer_config=nixl("kv_producer"), num_gpu_blocks_override=4096)
    while prompts := pipe.recv():
        pipe.send(compute(producer, prompts))
        while producer.has_work:
            producer.step()
        pipe.send(producer.scheduler.kv.pool.num_free_blocks)


@pytest.mark.slow
def test_two_processes_hand_prompts_over_by_the_package(model_folder: Folder) -> None:
    pytest.importorskip("nixl._api")
    prompts = {f"{seed}": prompt(seed, 200) for seed in range(200)}
    expected = run(make(model_folder("llama"), max_num_seqs=32), prompts)
    consumer = make(model_folder("llama"), kv_transfer_config=nixl("kv_consumer"), max_num_seqs=32)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_produce, args=(model_folder("llama"), theirs))
    process.start()
    try:
        tokens: dict[str, list[int]] = {}
        for start in range(0, 200, 20):
            some = {name: prompts[name] for name in list(prompts)[start : start + 20]}
            ours.send(some)
            tokens |= run(consumer, some, prefilled=True, kv_peer=ours.recv())
            assert ours.recv() == 4096
        ours.send({"killed": prompt(999, 200)})
        address = ours.recv()
        process.kill()
        process.join()
        late = {"killed": prompt(999, 200)}
        tokens |= run(consumer, late, prefilled=True, kv_peer=address)
    finally:
        process.kill()
        process.join()
        consumer.shutdown()
    assert tokens == expected | run(make(model_folder("llama")), late)
    assert connector_of(consumer).num_read_blocks == 200 * 12
    assert consumer.snapshot().kv_tier_failures_total == {"load_error": 12}
