"""`CudaDevice`: an NVIDIA GPU, by Triton kernels, with CUDA graphs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor

import kernels
from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.speculative import HEADS
from engine.devices.cpu import kernels_on
from engine.devices.device import DRAFT_PART, CacheNeed, Device, RunnerParts
from engine.devices.held import HostCopy
from engine.devices.host_memory import num_cpu_blocks
from engine.devices.slotted_adapters import SlottedAdapters
from engine.model_loader.loader import LoadedModel
from engine.models.context import AttentionContext
from engine.pooling.runner import PoolingRunner
from engine.sampling.sampler import Sampler
from engine.worker.cuda.drafted import draft_settings
from engine.worker.cuda.forward import DeviceForward
from engine.worker.cuda.inputs import Staged, stage_all
from engine.worker.cuda.memory import CudaMeter, DeviceMemory, num_gpu_blocks
from engine.worker.cuda.profile import profile
from engine.worker.cuda.runner import DeviceRunner
from engine.worker.cuda.setup import DeviceModel, capture, device_forward
from engine.worker.cuda.warm import warm_up_heads, warm_up_kernels
from engine.worker.interface import Runner
from kernels import KernelSet
from kernels.ablations import is_on


class CudaDevice(Device):
    """The GPU that torch sees first."""

    name: ClassVar[str] = "cuda"
    overlaps: ClassVar[bool] = True
    runs_adapters: ClassVar[bool] = True
    runs_draft_models: ClassVar[bool] = True
    gives_all_states: ClassVar[bool] = True
    heads: ClassVar[tuple[str, ...]] = HEADS
    keeps_adapters: ClassVar[bool] = False
    pins_memory: ClassVar[bool] = True
    token_budget: ClassVar[int] = 8192
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = (
        "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        #: Bytes, by whether they are of the draft model.
        self._kept_for_graphs: dict[bool, int] = {}
        self._adapters = SlottedAdapters(config)

    @classmethod
    def obstacle(cls) -> str:
        """See `Device`."""
        return "" if torch.cuda.is_available() else "torch sees no CUDA device."

    @property
    def arithmetic(self) -> tuple[str, str]:
        """See `Device`."""
        return torch.cuda.get_device_name(), super().arithmetic[1]

    def make_kernels(self) -> KernelSet:
        """See `Device`. Without Triton only plain torch is left, which somebody must ask for."""
        plain = not self.config.cpu_kernels or os.environ.get(kernels.FORCED) == "reference"
        if not plain and not has_triton():
            raise ConfigError(
                "device is cuda, but Triton, which the GPU kernels are written in, is not "
                "installed: pip install triton. (--no-cpu-kernels runs the model on plain torch, "
                "slowly.)",
                param="device",
            )
        return kernels_on(self.name, self.config)

    # -- adapters -----------------------------------------------------------------------------

    def prepare_adapters(self, loaded: LoadedModel) -> str:
        """See `Device`."""
        return self._adapters.prepare(
            loaded.model, self.kernels.name, lambda: CudaMeter(self.torch_device).device()[1]
        )

    def adapter_bytes(self) -> int:
        """See `Device`: the KV cache leaves so much."""
        return self._adapters.num_bytes

    @property
    def most_adapters(self) -> int:
        """See `Device`."""
        return self._adapters.most

    @property
    def most_adapter_rank(self) -> int:
        """See `Device`: recorded steps have room for what the highest rank needs."""
        return self._adapters.most_rank

    # -- memory -------------------------------------------------------------------------------

    def num_blocks(self, need: CacheNeed) -> int:
        """See `Device`: a step of full size is run to see what it takes."""
        config, groups = self.config, len(need.layout.groups)
        if config.num_gpu_blocks_override is not None:
            return num_cpu_blocks(config, need.bytes_per_token, need.blocks_per_sequence, groups)
        memory, size = self._profile(need), config.block_size
        block, kept = need.bytes_per_token * size, self._adapters.num_bytes
        self._kept_for_graphs = {False: memory.graphs}
        if (draft := need.draft) is not None:
            beside = self._profile(draft, is_draft=True)
            self._kept_for_graphs[True] = beside.graphs
            peak, graphs = max(memory.peak, beside.peak), memory.graphs + beside.graphs
            memory = replace(memory, peak=peak, graphs=graphs)
            own = draft.bytes_per_token * size
            block += min(block // DRAFT_PART, own)
            kept += draft.blocks_per_sequence * own
        return num_gpu_blocks(
            memory,
            config.gpu_memory_utilization,
            block,
            config.max_num_seqs * need.blocks_per_sequence,
            groups,
            kept,
        )

    def _profile(self, need: CacheNeed, *, is_draft: bool = False) -> DeviceMemory:
        """What the model takes beside its KV cache."""
        model, layout, budget = cast(DeviceModel, need.loaded.model), need.layout, need.token_budget
        config, longest = self._settings(is_draft, budget), self._max_blocks(need.loaded)

        def make_forward() -> DeviceForward | None:
            if need.loaded.pooler is not None:
                return None
            groups = len(layout.groups)
            return device_forward(model, config, budget, longest, groups, taps=need.taps)

        meter, taps = CudaMeter(self.torch_device), need.taps
        return profile(
            model, config, budget, longest, need.dtype, layout, meter, make_forward, taps
        )

    def _max_blocks(self, loaded: LoadedModel) -> int:
        """Blocks of a sequence of full length."""
        return -(-loaded.max_model_len // self.config.block_size)

    def _settings(self, is_draft: bool, token_budget: int) -> EngineConfig:
        """Those by which a model's steps are recorded."""
        return draft_settings(self.config, token_budget) if is_draft else self.config

    def put_away(self, tensors: Iterator[Tensor]) -> HostCopy:
        """See `Device`: in pages that the GPU copies from at full speed."""
        return HostCopy(tensors, self.torch_device, _pin)

    def give_back_memory(self) -> None:
        """See `Device`."""
        super().give_back_memory()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def step_failed(self) -> None:
        """Memory that lies idle in pieces may be what the step ran out of."""
        self.give_back_memory()

    # -- compute ------------------------------------------------------------------------------

    def make_runner(self, parts: RunnerParts) -> Runner:
        """See `Device`."""
        loaded, batch, device = parts.loaded, parts.batch, self.torch_device
        if loaded.pooler is not None:
            slots = self._adapters.slots

            def staged(ids: Tensor, context: AttentionContext) -> Staged:
                return stage_all(ids, context, device, slots)

            return PoolingRunner(loaded.model, batch, loaded.pooler, staged)
        compiled = is_on("sampling") and self.kernels.name != "reference"
        ops = self.kernels if compiled else None
        sampler = Sampler(loaded.eos_token_ids, ops, custom=parts.custom)
        model = cast(DeviceModel, loaded.model)
        longest, groups = self._max_blocks(loaded), len(parts.layout.groups)
        warm_up_kernels(
            model, self.config, parts.token_budget, longest, groups, loaded.model.spec.vocab_size
        )
        config = self._settings(parts.is_draft, parts.token_budget)
        taps: tuple[int, ...] = ()
        if parts.hidden is not None:
            taps = parts.hidden.taps
            warm_up_heads(parts.hidden, parts.token_budget)
        forward = device_forward(model, config, parts.token_budget, longest, groups, taps=taps)
        capture(forward, CudaMeter(device), self._kept_for_graphs.get(parts.is_draft))
        batch.decodes_first = is_on("split-batches")
        return DeviceRunner(model, batch, sampler, forward, device, parts.masks, parts.hidden)


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _pin(tensor: Tensor) -> Callable[[], None]:
    """Lock a host tensor's pages; what is returned lets go of them, before the tensor is freed."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    return lambda: torch.cuda.check_error(cudart.cudaHostUnregister(tensor.data_ptr()))
