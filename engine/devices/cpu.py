"""`CpuDevice`: the processor, by the compiled kernels or by plain torch."""

from __future__ import annotations

import ctypes
import weakref
from typing import ClassVar

import torch
from torch import Tensor

import kernels
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative_config import HEADS
from engine.devices.device import CacheRequirements, Device, RunnerInputs
from engine.devices.host_memory import (
    PagePrefaulter,
    kv_cache_space,
    max_states,
    num_cpu_blocks,
)
from engine.model_loader.loader import LoadedModel
from engine.models.decoder import NativeDecoder
from engine.sampling.rejection_sampler import make_rejection_sampler
from engine.sampling.sampler import Sampler
from engine.scheduler.plan import StepPlan
from engine.worker.compiled_step import CompiledStepRunner, tables_of
from engine.worker.interface import Runner
from engine.worker.model_runner import ModelRunner
from engine.worker.pooling_runner import PoolingRunner
from kernels import KernelSet

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""`mallopt`'s parameters, of glibc's malloc.h."""
_CACHED_BYTES, _HEAP_TENSOR_BYTES = 128 << 20, 32 << 20
"""Freed memory that the process keeps, and the largest tensors in it: glibc's own limit."""
MAPPED_AHEAD_BYTES = 512 << 20
"""KV cache, and states, whose pages are mapped before they are needed, when cores are idle."""


class CpuDevice(Device):
    """This machine's CPUs."""

    name: ClassVar[str] = "cpu"
    times_prompts: ClassVar[bool] = True
    runs_adapters: ClassVar[bool] = True
    runs_draft_models: ClassVar[bool] = True
    draft_head_methods: ClassVar[tuple[str, ...]] = HEADS
    runs_logits_processors: ClassVar[bool] = True
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = (
        "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._pages: PagePrefaulter | None = None
        self._state_pages: PagePrefaulter | None = None

    @classmethod
    def unavailable_reason(cls) -> str:
        """Never any."""
        return ""

    def make_kernels(self) -> KernelSet:
        return kernels_on(self.name, self.config)

    @property
    def arithmetic(self) -> tuple[str, str]:
        """See `Device`. What the kernels don't compute torch does, by its own choice of ISA."""
        return torch.backends.cpu.get_cpu_capability(), super().arithmetic[1]

    def num_blocks(self, need: CacheRequirements) -> int:
        min_blocks = len(need.layout.groups)
        return num_cpu_blocks(
            self.config, need.bytes_per_token, need.blocks_per_sequence, min_blocks
        )

    def max_states(self, state_bytes: int) -> int:
        return max_states(state_bytes)

    def max_checkpoints(self, state_bytes: int) -> int:
        if not (self.config.enable_prefix_caching or self.config.speculative_config):
            return 0
        return kv_cache_space(self.config) // state_bytes

    def on_cache_allocated(self, loaded: LoadedModel) -> None:
        """Map pages of the KV cache and of states before they are needed."""
        model = loaded.model
        if isinstance(model, NativeDecoder):
            caches = {id(tensor): tensor for cache in model.kv_caches for tensor in cache[:4]}
            self._pages = self._map_ahead(
                [tensor for tensor in caches.values() if tensor is not None]
            )
            if model.states is not None:
                self._state_pages = self._map_ahead(
                    [part for layer in model.states.layers.values() for part in layer.parts]
                )

    def _map_ahead(self, caches: list[Tensor]) -> PagePrefaulter:
        pages = PagePrefaulter(self.kernels, caches, MAPPED_AHEAD_BYTES)
        weakref.finalize(self, pages.close, wait_s=0.0)
        return pages

    def on_cache_released(self) -> None:
        for pages in (self._pages, self._state_pages):
            if pages is not None:
                pages.close()
        self._pages = self._state_pages = None

    def note_step(self, plan: StepPlan) -> None:
        if self._pages is not None:
            tables = [new.block_ids for new in plan.new]
            tables += [table for _, table in plan.new_blocks]
            self._pages.record_blocks(block for groups in tables for ids in groups for block in ids)
        if self._state_pages is not None:
            # Sequences' own blocks are among these: a prompt keeps at least one checkpoint.
            self._state_pages.record_blocks(block for *_, block in plan.checkpoints)

    def use_threads(self, loaded: LoadedModel) -> None:
        """The native decoder's work is the kernels': torch keeps one thread there."""
        on_kernels = isinstance(loaded.model, NativeDecoder)
        self._threads.use(self.kernels, torch_too=not on_kernels)

    def make_runner(self, parts: RunnerInputs) -> Runner:
        loaded, batch = parts.loaded, parts.batch
        _keep_freed_memory()
        if loaded.pooler is not None:
            return PoolingRunner(loaded.model, batch, loaded.pooler)
        acceptance = make_rejection_sampler(self.config)
        sampler = Sampler(loaded.eos_token_ids, self.kernels, acceptance, parts.custom)
        decodes = self._decodes(parts, sampler)
        return ModelRunner(loaded.model, batch, sampler, decodes, parts.masks, parts.hidden)

    def _decodes(self, parts: RunnerInputs, sampler: Sampler) -> CompiledStepRunner | None:
        """Runs decode steps in one call, if model and kernels support it; None: they don't."""
        model, batch = parts.loaded.model, parts.batch
        if not isinstance(model, NativeDecoder):
            return None
        taps = () if parts.hidden is None else parts.hidden.aux_layers
        step = model.compile_step(tables_of(batch), taps)
        if step is None:
            return None
        width = model.spec.hidden_size * max(1, len(taps))
        hidden = None if parts.hidden is None else (parts.hidden, width)
        return CompiledStepRunner(step, batch, sampler, model.spec.vocab_size, parts.masks, hidden)

    def close(self) -> None:
        self.on_cache_released()


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensors, of which each layer allocates some:
    clearing fresh pages takes a tenth of a vision tower's time. Called once the weights are packed,
    whose temporary tensors are better returned. Does nothing with another C library.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _HEAP_TENSOR_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _CACHED_BYTES)


def kernels_on(device: str, config: EngineConfig) -> KernelSet:
    """The kernels for a device, as the settings and QUIRE_KERNELS ask for them.

    Raises `ConfigError` where the environment asks for kernels that can't run there.
    """
    try:
        return kernels.get(
            device, use_compiled=config.cpu_kernels, batch_invariant=config.batch_invariant
        )
    except kernels.KernelsUnavailable as error:
        raise ConfigError(str(error), param=error.param) from error
