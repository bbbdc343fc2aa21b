"""How much KV cache a GPU gets: by a device that only counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices import cuda as slotted_adapters
from engine.devices.accelerator import AcceleratorMeter
from engine.devices.cuda import CudaDevice, LoraSlotAllocator
from engine.devices.device import CacheRequirements
from engine.kv_cache.kv_cache_config import single_group_config
from engine.worker.gpu.memory import MemoryProfile, graph_bytes, num_gpu_blocks
from engine.worker.gpu.setup import SAMPLING_COPIES, capture, profile
from tests.engine.models import make_model

GIB = 1 << 30
MEMORY = MemoryProfile(total=10 * GIB, other=1 * GIB, peak=3 * GIB)


class FakeMeter:
    """A device whose allocator holds what the test says, one reading after the other."""

    def __init__(
        self, allocated: Iterator[int], peak: int = 0, free: int = 0, total: int = 0
    ) -> None:
        self._allocated, self._peak, self._device = allocated, peak, (free, total)
        self.num_started = 0

    def begin(self) -> None:
        self.num_started += 1

    def reserved(self) -> int:
        return next(self._allocated)

    def peak(self) -> int:
        return self._peak

    def device(self) -> tuple[int, int]:
        return self._device


class FakeForward:
    """Captures a number of graphs, as long as there is room."""

    static_bytes = 1000

    def __init__(self, num_requested: int) -> None:
        self.num_requested, self.num_captured = num_requested, 0

    def capture(self, has_memory, *, quiet=False) -> int:  # type: ignore[no-untyped-def]
        for _ in range(self.num_requested):
            if has_memory():
                self.num_captured += 1
        return self.num_captured


def test_blocks_are_what_a_full_step_leaves() -> None:
    free_bytes = int(0.9 * (10 * GIB)) - 4 * GIB
    assert num_gpu_blocks(MEMORY, 0.9, 1 << 20, 10**9, 1) == free_bytes >> 20
    with_graphs = MemoryProfile(MEMORY.total, MEMORY.other, MEMORY.peak, graphs=GIB)
    assert num_gpu_blocks(with_graphs, 0.9, 1 << 20, 10**9, 1) == (free_bytes - GIB) >> 20
    assert num_gpu_blocks(MEMORY, 0.9, 1 << 20, 10**9, 1, GIB) == (free_bytes - GIB) >> 20
    assert num_gpu_blocks(MEMORY, 0.9, 1 << 20, 7, 1) == 7


def test_whatever_the_sizes_nothing_runs_out() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        memory = MemoryProfile(*(rng.randrange(1, 80 * GIB) for _ in range(4)))
        share, block = rng.uniform(0.01, 1.0), rng.randrange(1, 64 << 20)
        try:
            blocks = num_gpu_blocks(memory, share, block, 10**9, 1)
        except ConfigError:
            continue
        used_blocks = blocks * block + memory.other + memory.peak + memory.graphs
        assert used_blocks <= memory.total * share


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization") as caught:
        num_gpu_blocks(MEMORY, 0.3, 1 << 20, 100, 1)
    assert caught.value.param == "gpu_memory_utilization"


@pytest.mark.parametrize(
    ("costs", "count", "expected"),
    [([], 0, 0), ([400], 1, 500), ([400, 40], 2, 550), ([400, 40], 12, 1050)],
)
def test_graphs_cost_what_the_first_few_did(costs: list[int], count: int, expected: int) -> None:
    assert graph_bytes(costs, count) == expected


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = make_model("mistral", tmp_path_factory.mktemp("m"), vocab_size=2048)
    return LLM(
        str(folder), dtype="float32", cpu_kernels=False, num_gpu_blocks_override=8,
        max_model_len=64, skip_tokenizer_init=True,
    )  # fmt: skip


def test_full_steps_are_run_and_leave_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest batch, and of one of decodes alone, with room for sampling."""
    model, shapes, seen = llm.core.executor.worker.loaded.model, [], []
    forward, empty_like = model.forward, torch.empty_like
    monkeypatch.setattr(model, "forward", lambda ids, b: seen.append((ids, b)) or forward(ids, b))
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **more: shapes.append(x.shape) or empty_like(x, **more)
    )
    config = EngineConfig(model="m", max_num_seqs=5, block_size=16)
    layout = llm.core.capacity.layout
    # Before the graphs; after one, and after another; at the end.
    meter = FakeMeter(iter([100, 100, 900, 950, 60]), peak=70, free=800, total=1000)
    measured = profile(
        model, config, 24, [4], torch.float32, layout, meter, lambda: FakeForward(10)
    )  # fmt: skip
    assert [(len(ids), len(batch.seq_lens)) for ids, batch in seen] == [(24, 5), (5, 5)]
    assert all(batch.block_tables.shape == (5, 4) for _, batch in seen)
    assert shapes.count(torch.Size([5, 2048])) == 2 * SAMPLING_COPIES
    # 140 are another process's; ten graphs of which the first took 800 and each other 50.
    expected = int((800 + 50 + 8 * 50) * 1.25) + 1000
    assert measured == MemoryProfile(total=1000, other=140, peak=70, graphs=expected)
    assert model.kv_caches == []
    assert meter.num_started == 3


def test_without_graphs_none_are_counted(llm: LLM) -> None:
    config = EngineConfig(model="m", max_num_seqs=2)
    meter = FakeMeter(iter([60]), peak=70, free=800, total=1000)
    model, layout = llm.core.executor.worker.loaded.model, llm.core.capacity.layout
    measured = profile(model, config, 8, [4], torch.float32, layout, meter, lambda: None)
    assert measured.graphs == 0


@pytest.mark.parametrize(
    ("reserved_bytes", "free", "expected"), [(None, GIB, 9), (250, GIB, 2), (None, 1 << 20, 0)]
)
def test_graphs_stop_at_what_was_kept_for_them(
    reserved_bytes: int | None, free: int, expected: int
) -> None:
    """Each takes 100 bytes."""
    forward = FakeForward(9)
    meter = FakeMeter(iter(range(0, 10**6, 100)), free=free)
    capture(forward, meter, reserved_bytes)
    assert forward.num_captured == expected


class Slotless(SimpleNamespace):
    """A decoder as far as its adapters go."""


def test_a_gpu_keeps_memory_for_adapters_and_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is the same after the weights were read anew: adapters that stayed have slots."""
    config = EngineConfig(model="m", max_num_seqs=8)
    device = object.__new__(CudaDevice)
    device.config, device._adapters = config, LoraSlotAllocator(config)
    device.kernels = SimpleNamespace(name="a test", device=torch.device("cpu"))
    calls: list[tuple[int, int]] = []

    def make(max_rows: int, rank: int) -> object:
        calls.append((max_rows, rank))
        return SimpleNamespace(most=max_rows)

    monkeypatch.setattr(slotted_adapters, "SupportsLoRA", Slotless)
    monkeypatch.setattr(AcceleratorMeter, "device", lambda self: (0, 64 * GIB))

    def loaded(make_lora_slots: Any = make) -> Any:
        model = Slotless(make_lora_slots=make_lora_slots, arguments=[])
        model.use_lora_slots = model.arguments.append
        return SimpleNamespace(model=model)

    first, woken = loaded(), loaded()
    assert device.prepare_adapters(first) == device.prepare_adapters(woken) == ""
    assert first.model.arguments == woken.model.arguments == [device._adapters.slots]
    assert calls == [(256 + 8, 256)]
    assert device.adapter_bytes() == 2 * GIB
    device._adapters = LoraSlotAllocator(config)
    assert "a test" in device.prepare_adapters(loaded(lambda *_: None))
    device._adapters = LoraSlotAllocator(EngineConfig(model="m", enable_lora=False))
    off = loaded()
    assert device.prepare_adapters(off) == ""
    assert off.model.arguments == []


def test_states_take_their_part_of_what_a_gpu_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a draft model lie beside those of the model, which alone are sized by it."""
    config = EngineConfig(model="m", gpu_memory_utilization=0.5, enable_lora=False)
    layout, free = single_group_config(1), 50 * GIB

    def gpu() -> CudaDevice:
        device = object.__new__(CudaDevice)
        device.config, device._adapters = config, LoraSlotAllocator(config)
        device.kernels = SimpleNamespace(device=torch.device("cpu"))
        return device

    def profile(need: CacheRequirements, *, is_draft: bool = False) -> MemoryProfile:
        return MemoryProfile(total=80 * GIB, other=0, peak=(29 if is_draft else 28) * GIB)

    def need(layout: Any, draft: CacheRequirements | None = None) -> CacheRequirements:
        loaded: Any = SimpleNamespace(spec=SimpleNamespace(state_bytes=GIB // 2))
        return CacheRequirements(loaded, torch.bfloat16, layout, 1 << 16, 1 << 14, 1, draft)

    monkeypatch.setattr(AcceleratorMeter, "device", lambda self: (free, 80 * GIB))
    device = gpu()
    monkeypatch.setattr(device, "_profile", profile)
    assert device.max_states(GIB // 64) == device.max_checkpoints(GIB // 64) == 80
    assert device.num_blocks(need(layout)) == int(9.5 * GIB) >> 20
    draft = replace(need(layout.with_states(4)), bytes_per_token=0, blocks_per_sequence=0)
    assert device.num_blocks(need(layout, draft)) == int(7.5 * GIB) >> 20
    free = 30 * GIB
    full = gpu()
    assert (full.max_states(1), full.max_checkpoints(1)) == (1, 0)
