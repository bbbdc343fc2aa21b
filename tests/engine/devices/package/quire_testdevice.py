"""A device that an installed package brings: plain torch in float32 on its own terms."""

from __future__ import annotations

from typing import ClassVar

import kernels
from engine.devices import CacheRequirements, Device, RunnerInputs
from engine.sampling.sampler import Sampler
from engine.worker.interface import Runner
from engine.worker.model_runner import ModelRunner
from kernels import KernelSet


class TestDevice(Device):
    """What docs/extending.md describes, nothing more."""

    name: ClassVar[str] = "testdevice"
    token_budget: ClassVar[int] = 64
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    def make_kernels(self) -> KernelSet:
        return kernels.get("cpu", use_compiled=False)

    def num_blocks(self, need: CacheRequirements) -> int:
        return self.config.num_gpu_blocks_override or 128

    def make_runner(self, parts: RunnerInputs) -> Runner:
        sampler = Sampler(parts.loaded.eos_token_ids, None)
        return ModelRunner(parts.loaded.model, parts.batch, sampler, masks=parts.masks)
