"""A draft model beside its model on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices.cpu import CpuDevice
from engine.devices.cuda import CudaDevice
from engine.devices.device import CacheNeed, RunnerParts
from engine.executor.drafts import _check_device
from engine.worker.cuda.memory import DeviceMemory
from engine.worker.cuda.runner import DeviceRunner
from tests.engine.cuda.fake_device import FakeDevice, OnDevice
from tests.engine.models import make_model
from tests.engine.speculative.free import make_drafts_free

PROMPTS = [[5, 9, 17, 33, 65], [1, 2, 3, 4, 5, 6, 7, 8, 9], [40, 41]]
GIB = 1 << 30


def nearly(folder: Path, to: Path) -> Path:
    """A model that mostly says what that one says."""
    make_model("llama", to)
    made = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.001 * torch.randn(tensor.shape, generator=made)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def texts(llm: LLM) -> list[list[int]]:
    """Greedy, drawn, and with penalties on what was said."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8, "seed": 4, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **way) for way in ways]
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(asked, params, use_tqdm=False)
    llm.core.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_drafts_of_a_model_on_the_device_change_no_token(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It reads, draws and goes back to where a draft failed, by runners of the device alone."""
    monkeypatch.setattr(OnDevice, "strict", False)
    make_drafts_free(monkeypatch)
    device, folder = FakeDevice(monkeypatch), model_folder("llama")
    plain = texts(device.engine(folder, async_scheduling=False))
    made: list[RunnerParts] = []

    def make_runner(self: CpuDevice, parts: RunnerParts) -> DeviceRunner:
        made.append(parts)
        return device.runner(parts.loaded, parts.batch, parts.masks)

    monkeypatch.setattr(CpuDevice, "make_runner", make_runner)
    wanted = {"method": "draft_model", "model": str(nearly(folder, tmp_path)),
              "num_speculative_tokens": 4}  # fmt: skip
    llm = device.engine(folder, async_scheduling=False, speculative_config=wanted)
    assert [parts.is_draft for parts in made] == [True]
    assert texts(llm) == plain
    stats = llm.core.stats
    assert stats.spec_decode_num_accepted_tokens_total > 20
    assert stats.spec_decode_num_accepted_tokens_total < stats.spec_decode_num_draft_tokens_total


def test_a_gpu_leaves_a_draft_model_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger of the two steps, a draft's part of each block, and a sequence of full length."""
    device = CudaDevice.__new__(CudaDevice)
    device.config = EngineConfig(model="m", block_size=16, gpu_memory_utilization=0.5)
    device._kept_for_adapters = 0
    profiled: list[bool] = []

    def profile(need: CacheNeed, *, eager: bool = False) -> DeviceMemory:
        profiled.append(eager)
        return DeviceMemory(total=80 * GIB, other=0, peak=(32 if eager else 30) * GIB)

    monkeypatch.setattr(device, "_profile", profile)

    class Layout:
        groups = (0,)

    def need(per_token: int, draft: CacheNeed | None = None) -> CacheNeed:
        longest = GIB // (16 << 16)
        return CacheNeed(None, torch.bfloat16, Layout(), per_token, longest, 1, draft)  # type: ignore[arg-type]

    alone = device.num_blocks(need(1 << 18))
    assert alone == 10 * GIB // (16 << 18)
    small, wide = (device.num_blocks(need(1 << 18, need(own))) for own in (1 << 15, 1 << 18))
    assert small == (8 * GIB - GIB // 2) // (16 * ((1 << 18) + (1 << 15)))
    assert wide == (8 * GIB - 4 * GIB) // (16 * ((1 << 18) + (1 << 16)))
    assert profiled == [False, False, True, False, True]


def test_heads_are_refused_by_name(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "runs_heads", False)
    device = CpuDevice(EngineConfig(model=str(model_folder("llama"))))
    _check_device(device, heads=False)
    with pytest.raises(ConfigError, match=r"heads aren't supported .* suffix and draft_model are"):
        _check_device(device, heads=True)
