"""`CudaDevice`: an NVIDIA GPU with Triton kernels and CUDA graphs."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor

import kernels
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative_config import HEADS
from engine.devices.accelerator import AcceleratorMeter, CudaRecorder
from engine.devices.cpu import kernels_on
from engine.devices.device import DRAFT_CACHE_DIVISOR, CacheRequirements, Device, RunnerInputs
from engine.devices.host_memory import GIB, num_cpu_blocks
from engine.devices.offload import HostCopy
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.model_loader.loader import LoadedModel
from engine.models.forward_context import AttentionMetadata
from engine.models.supports_lora import SupportsLoRA
from engine.sampling.sampler import Sampler
from engine.scheduler.encoder_cache import encoder_capacity
from engine.worker.gpu.encoder_memory import fill_encoder_cache
from engine.worker.gpu.graphs import DeviceForward
from engine.worker.gpu.input_buffers import StagedInputs, stage_eager
from engine.worker.gpu.memory import MemoryProfile, num_gpu_blocks
from engine.worker.gpu.model_runner import GpuModelRunner, draft_settings
from engine.worker.gpu.setup import (
    DeviceModel,
    capture,
    device_forward,
    profile,
    warm_up_draft_heads,
    warm_up_kernels,
)
from engine.worker.interface import Runner
from engine.worker.pooling_runner import PoolingRunner
from kernels import KernelSet
from kernels.lora import LoraSlots

_MAX_ADAPTERS, _MAX_RANK = 256, 256
"""Defaults: maximum number of loaded adapters, and their maximum rank."""
_PART, _MAX_BYTES = 32, 4 * GIB
"""A GPU's memory for adapters: one part of so many, at most so many bytes."""
_STATES_PART = 4
"""Of the memory that weights leave, one part of so many is for states: as on a CPU."""
_MIN_CAPABILITY = (8, 0)
"""Minimum compute capability of NVIDIA's GPUs: older ones don't multiply bfloat16."""


class LoraSlotAllocator:
    """Slots of adapters, and the memory that the KV cache leaves for them.

    Attributes:
        slots: set by `prepare` if the model supports adapters.
        num_bytes: bytes of the adapters' memory.
        max_adapters, max_rank: maximum number of loaded adapters, and their maximum rank.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.slots: LoraSlots | None = None
        self.num_bytes = 0
        self.max_adapters = config.max_loras or _MAX_ADAPTERS
        self.max_rank = config.max_lora_rank or _MAX_RANK

    def prepare(self, model: object, kernels: str, total: Callable[[], int]) -> str:
        """See `Device.prepare_adapters`: graphs are recorded with the slots, so these are created
        first, and stay when the weights are read again.

        `kernels`: name of the kernel set; `total`: returns the GPU's bytes.
        """
        if not self._config.enable_lora or not isinstance(model, SupportsLoRA):
            return ""
        if self.slots is None:
            # An evicted adapter keeps its slot until the steps that use it are done.
            num_slots = self.max_adapters + self._config.max_num_seqs
            self.slots = model.make_lora_slots(num_slots, self.max_rank)
        if self.slots is None:
            return f"Adapters aren't supported by the kernels {kernels} on a GPU."
        model.use_lora_slots(self.slots)
        self.num_bytes = min(total() // _PART, _MAX_BYTES)
        return ""


class CudaDevice(Device):
    """The first GPU that torch lists."""

    name: ClassVar[str] = "cuda"
    overlaps: ClassVar[bool] = True
    runs_adapters: ClassVar[bool] = True
    runs_draft_models: ClassVar[bool] = True
    returns_all_hidden_states: ClassVar[bool] = True
    draft_head_methods: ClassVar[tuple[str, ...]] = HEADS
    caches_adapters_on_host: ClassVar[bool] = False
    pins_memory: ClassVar[bool] = True
    token_budget: ClassVar[int] = 8192
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = (
        "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        #: Bytes by whether they belong to the draft model.
        self._graph_bytes: dict[bool, int] = {}
        self._adapters = LoraSlotAllocator(config)

    @classmethod
    def unavailable_reason(cls) -> str:
        if torch.version.hip is not None:
            return "this torch was built for ROCm: name the device rocm."
        return "" if torch.cuda.is_available() else "torch sees no CUDA device."

    @property
    def arithmetic(self) -> tuple[str, str]:
        return torch.cuda.get_device_name(), super().arithmetic[1]

    def make_kernels(self) -> KernelSet:
        """See `Device`. Without Triton only plain torch remains, which must be requested
        explicitly.
        """
        use_reference = not self.config.cpu_kernels or os.environ.get(kernels.FORCED) == "reference"
        if not use_reference and not has_triton():
            raise ConfigError(
                "device is cuda, but Triton, which the GPU kernels are written in, is not "
                "installed: pip install triton. (--no-cpu-kernels runs the model on plain torch, "
                "slowly.)",
                param="device",
            )
        if not use_reference:
            self.check_hardware()
        return kernels_on("cuda", self.config)

    @classmethod
    def check_hardware(cls) -> None:
        """Raise `ConfigError` for a GPU that the kernels aren't compiled for."""
        if not torch.cuda.is_available():
            return
        capability = torch.cuda.get_device_capability()
        if capability < _MIN_CAPABILITY:
            present, required = (".".join(map(str, pair)) for pair in (capability, _MIN_CAPABILITY))
            raise ConfigError(
                f"device is cuda, but the GPU's compute capability is {present}: the kernels need "
                f"{required} or higher. (--no-cpu-kernels runs the model on plain torch, slowly.)",
                param="device",
            )

    def prepare_adapters(self, loaded: LoadedModel) -> str:
        return self._adapters.prepare(
            loaded.model, self.kernels.name, lambda: AcceleratorMeter(self.torch_device).device()[1]
        )

    def adapter_bytes(self) -> int:
        """See `Device`: the memory that the KV cache leaves."""
        return self._adapters.num_bytes

    @property
    def max_adapters(self) -> int:
        return self._adapters.max_adapters

    @property
    def max_adapter_rank(self) -> int:
        """See `Device`: recorded steps have buffers for the maximum rank."""
        return self._adapters.max_rank

    def num_blocks(self, need: CacheRequirements) -> int:
        """See `Device`: runs a full-size step to measure its memory."""
        config, groups = self.config, len(need.layout.groups)
        if config.num_gpu_blocks_override is not None:
            return num_cpu_blocks(config, need.bytes_per_token, need.blocks_per_sequence, groups)
        memory, size = self._profile(need), config.block_size
        block, reserved_bytes = need.bytes_per_token * size, self._adapters.num_bytes
        if getattr(need.loaded.spec, "state_bytes", 0):
            reserved_bytes += self._state_space
        self._graph_bytes = {False: memory.graphs}
        if (draft := need.draft) is not None:
            draft_memory = self._profile(draft, is_draft=True)
            self._graph_bytes[True] = draft_memory.graphs
            graphs, states = memory.graphs + draft_memory.graphs, 0
            if (group := draft.layout.state_group) is not None:  # they were there while it ran
                states = group.num_blocks * getattr(draft.loaded.spec, "state_bytes", 0)
            peak = max(memory.peak, draft_memory.peak - states)
            memory = replace(memory, peak=peak, graphs=graphs)
            draft_block_bytes = draft.bytes_per_token * size
            block += min(block // DRAFT_CACHE_DIVISOR, draft_block_bytes)
            reserved_bytes += draft.blocks_per_sequence * draft_block_bytes + states
        return num_gpu_blocks(
            memory,
            config.gpu_memory_utilization,
            block,
            config.max_num_seqs * need.blocks_per_sequence,
            groups,
            reserved_bytes,
        )

    @functools.cached_property
    def _state_space(self) -> int:
        """Bytes for states, half of them for checkpoints; measured before there is a cache."""
        free, total = AcceleratorMeter(self.torch_device).device()
        remaining = free - int(total * (1 - self.config.gpu_memory_utilization))
        return max(0, remaining) // _STATES_PART

    def max_states(self, state_bytes: int) -> int:
        return max(1, self._state_space // 2 // state_bytes)

    def max_checkpoints(self, state_bytes: int) -> int:
        if not (self.config.enable_prefix_caching or self.config.speculative_config):
            return 0
        return self._state_space // 2 // state_bytes

    def _profile(self, need: CacheRequirements, *, is_draft: bool = False) -> MemoryProfile:
        """Bytes that the model takes in addition to its KV cache."""
        model, layout, budget = cast(DeviceModel, need.loaded.model), need.layout, need.token_budget
        config, lengths = self._settings(is_draft, budget), self._table_lengths(need.loaded, layout)

        def make_forward() -> DeviceForward | None:
            if need.loaded.pooler is not None:
                return None
            return device_forward(model, config, budget, lengths, CudaRecorder, need.taps)

        def fill_encoder() -> Tensor | None:
            capacity = encoder_capacity(budget, need.loaded.max_model_len)
            return fill_encoder_cache(model, need.loaded.tokenizer_folder, capacity)

        meter, taps = AcceleratorMeter(self.torch_device), need.taps
        return profile(
            model, config, budget, lengths, need.dtype, layout, meter, make_forward, taps,
            fill_encoder,
        )  # fmt: skip

    def _table_lengths(self, loaded: LoadedModel, layout: KVCacheConfig) -> list[int]:
        """Block table length of each group for a sequence of full length."""
        return layout.table_lengths(loaded.max_model_len, self.config.block_size)

    def _settings(self, is_draft: bool, token_budget: int) -> EngineConfig:
        """Settings for recording a model's steps."""
        return draft_settings(self.config, token_budget) if is_draft else self.config

    def offload(self, tensors: Iterator[Tensor]) -> HostCopy:
        """See `Device`: in pinned pages, from which the GPU copies at full speed."""
        return HostCopy(tensors, self.torch_device, _pin)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def release_memory(self) -> None:
        super().release_memory()
        self.synchronize()
        torch.accelerator.empty_cache()

    def on_step_failed(self) -> None:
        """See `Device`: the step may have run out of memory because of fragmentation."""
        self.release_memory()

    def make_runner(self, parts: RunnerInputs) -> Runner:
        loaded, batch, device = parts.loaded, parts.batch, self.torch_device
        if loaded.pooler is not None:
            slots = self._adapters.slots

            def staged(ids: Tensor, context: AttentionMetadata) -> StagedInputs:
                return stage_eager(ids, context, device, slots)

            return PoolingRunner(loaded.model, batch, loaded.pooler, staged)
        ops = self.kernels if self.kernels.name != "reference" else None
        sampler = Sampler(loaded.eos_token_ids, ops, custom=parts.custom)
        model = cast(DeviceModel, loaded.model)
        lengths = self._table_lengths(loaded, parts.layout)
        warm_up_kernels(
            model, self.config, parts.token_budget, lengths, loaded.model.spec.vocab_size
        )
        config = self._settings(parts.is_draft, parts.token_budget)
        taps: tuple[int, ...] = ()
        if parts.hidden is not None:
            taps = parts.hidden.aux_layers
            warm_up_draft_heads(parts.hidden, parts.token_budget)
        forward = device_forward(model, config, parts.token_budget, lengths, CudaRecorder, taps)
        capture(forward, AcceleratorMeter(device), self._graph_bytes.get(parts.is_draft))
        batch.decodes_first = True
        return GpuModelRunner(model, batch, sampler, forward, device, parts.masks, parts.hidden)


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _pin(tensor: Tensor) -> Callable[[], None]:
    """Lock a host tensor's pages; returns what unlocks them before the tensor is freed."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    return lambda: torch.cuda.check_error(cudart.cudaHostUnregister(tensor.data_ptr()))
