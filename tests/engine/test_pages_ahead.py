"""A KV cache's pages are mapped before its blocks are handed out."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.contract.engine_config import EngineConfig
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
from engine.devices.host_memory import PagePrefaulter
from engine.scheduler.plan import NewSequence, StepPlan
from kernels.reference import ReferenceKernels
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

BLOCK_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lest tests wait."""
    monkeypatch.setattr("engine.devices.host_memory._PAUSE_S", 0.01)


class Mapped(ReferenceKernels):
    """Notes how many blocks were mapped, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[int] = []
        self.priority = (-1, -1)

    def map_pages(self, cache: torch.Tensor) -> None:
        self.priority = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        self.blocks += cache[:, 0].tolist()


@pytest.fixture
def ops() -> Mapped:
    return Mapped()


@pytest.fixture
def pages(ops: Mapped) -> Iterator[PagePrefaulter]:
    cache = torch.zeros(40, BLOCK_BYTES, dtype=torch.uint8)
    cache[:, 0] = torch.arange(40)
    pages = PagePrefaulter(ops, [cache], 10 * BLOCK_BYTES)
    yield pages
    pages.close()


def reached(ops: Mapped, count: int) -> bool:
    """Whether so many blocks become mapped, and no more."""
    deadline = time.monotonic() + 60
    while len(ops.blocks) < count and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(0.01)
    return ops.blocks == list(range(count))


def test_some_are_mapped_at_once_and_more_as_blocks_are_handed_out(
    ops: Mapped, pages: PagePrefaulter
) -> None:
    assert reached(ops, 10)
    pages.record_blocks([3, 1])
    assert reached(ops, 14)
    pages.record_blocks([2])
    assert reached(ops, 14)
    pages.record_blocks([35])
    assert reached(ops, 40)


def test_the_thread_ends_with_its_executor(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.devices.cpu.MAPPED_AHEAD_BYTES", 1 << 20)
    folder = str(model_folder("llama"))
    core = EngineCore(EngineConfig(model=folder, num_gpu_blocks_override=20_000))
    warm_up(core)
    pages = core.executor.worker.device._pages
    assert pages is not None
    assert pages._thread.is_alive()
    del core
    gc.collect()
    pages._thread.join(60)
    assert not pages._thread.is_alive()


def test_fault_48_the_thread_gets_time_to_end_on_a_busy_machine(
    ops: Mapped, pages: PagePrefaulter
) -> None:
    """A process isn't dead before its last thread is."""
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert reached(ops, 10)
    policy, nice = ops.priority
    assert policy == os.SCHED_OTHER
    assert nice <= max(priority, 5)


def test_nothing_is_mapped_between_steps(
    ops: Mapped, pages: PagePrefaulter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reached(ops, 10)
    monkeypatch.setattr("engine.devices.host_memory._PAUSE_S", 60.0)
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(0.01))
    pages.record_blocks([3])
    assert reached(ops, 10)
    pages._noted_at -= 61
    assert reached(ops, 14)


def test_the_thread_ends_with_its_work(ops: Mapped, pages: PagePrefaulter) -> None:
    pages.record_blocks([39])
    pages._thread.join(60)
    assert not pages._thread.is_alive()
    assert ops.blocks == list(range(40))


def test_a_replica_maps_ahead(model_folder: Callable[[str], Path]) -> None:
    folder = str(model_folder("llama"))
    names = [thread.name for thread in threading.enumerate()]
    core = EngineCore(EngineConfig(model=folder, num_gpu_blocks_override=50))
    warm_up(core)
    pages = core.executor.worker.device._pages
    pages.close()
    pages._thread.join()
    assert [thread.name for thread in threading.enumerate()] == names


def test_pages_of_states_are_mapped_ahead_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new sequence's blocks of keys and values count, too."""
    make_checkpoint(RECIPES["granite4"], tmp_path)
    monkeypatch.setattr("engine.devices.cpu.MAPPED_AHEAD_BYTES", 0)
    core = EngineCore(EngineConfig(model=str(tmp_path), dtype="float32", num_threads=1))
    warm_up(core)
    device, states = core.executor.worker.device, core.executor.worker.loaded.model.states
    parts = [part for layer in states.layers.values() for part in layer.parts]
    assert [*map(id, device._state_pages._caches)] == [*map(id, parts)]
    device._pages._requested = device._state_pages._requested = 0
    new = NewSequence(0, [1, 2], 2, 0, [[5], [7]], SamplingParams(), seed=0)
    device.note_step(StepPlan(1, new=[new], checkpoints=[(0, 16, 3)]))
    assert (device._pages._requested, device._state_pages._requested) == (8, 4)
    core.shutdown()
