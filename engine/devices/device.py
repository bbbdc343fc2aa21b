"""`Device`: where a model runs, and everything that the engine must know about it.

The engine never asks which device it has, only for its capabilities. A new device is a subclass,
found by name: a built-in, or an installed package's entry point in the group `quire.devices`
(docs/extending.md).
"""

# ruff: noqa: B027

from __future__ import annotations

import ctypes
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.devices.host_memory import GIB
from engine.devices.offload import HostCopy
from engine.devices.threads import Threads
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.model_loader.loader import LoadedModel
from engine.model_loader.model_impl import BuildRequest, LoadedImpl, build_model
from engine.sampling.custom_processors import LogitsProcessors
from engine.scheduler.plan import StepPlan
from engine.system.host import available_memory
from engine.worker.hidden_states import HiddenStateStore
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox, Runner
from kernels import KernelSet

#: Version of `Device` and `Runner`, raised by changes that packages must follow. A device names the
#: version it was written for; one with another version is refused before anything is loaded.
CONTRACT_VERSION = 1


def adapter_bytes(part: int, max_gib: int) -> int:
    """A fraction 1/`part` of the free memory for adapters, at most so many GiB."""
    return min(available_memory() // part, max_gib * GIB)


#: Maximum fraction of the target's KV cache that a draft model's KV cache may take.
DRAFT_CACHE_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class CacheRequirements:
    """A model's memory requirements for its KV cache.

    Attributes:
        loaded: the model; its cache isn't allocated yet.
        dtype: of keys and values.
        layout: its KV cache groups.
        bytes_per_token: for the layers that a block holds.
        blocks_per_sequence: blocks of a sequence of full length.
        token_budget: maximum number of tokens of a step.
        draft: requirements of its draft model; None: it has none.
        taps: its layers whose inputs drafts read.
    """

    loaded: LoadedModel
    dtype: torch.dtype
    layout: KVCacheConfig
    bytes_per_token: int
    blocks_per_sequence: int
    token_budget: int
    draft: CacheRequirements | None = None
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunnerInputs:
    """The parts from which a runner is created.

    Attributes:
        loaded: the model, with its KV cache.
        batch: holds no sequence yet.
        masks: source of grammar bitmasks.
        layout, token_budget: as in `CacheRequirements`.
        hidden: stores the states that draft heads need; None: there are no heads.
        is_draft: it drafts for another model on the device.
        custom: the engine's logits processors; None: there are none.
    """

    loaded: LoadedModel
    batch: InputBatch
    masks: BitmaskInbox
    layout: KVCacheConfig
    token_budget: int
    hidden: HiddenStateStore | None = None
    is_draft: bool = False
    custom: LogitsProcessors | None = None


class Device(ABC):
    """One replica's device.

    Args:
        config: the replica's settings.

    Raises `ConfigError` for settings that it doesn't support.
    """

    #: Its name for `--device`.
    name: ClassVar[str]
    #: The `CONTRACT_VERSION` that it was written for.
    contract_version: ClassVar[int] = 1
    #: Steps are planned while the previous one runs, unless `async_scheduling` says otherwise.
    overlaps: ClassVar[bool] = False
    #: Prompts are timed at startup, so that they leave time for decodes: useful if a chunk of a
    #: prompt takes much longer than a decode.
    times_prompts: ClassVar[bool] = False
    #: Whether rows of a step may use LoRA adapters.
    runs_adapters: ClassVar[bool] = False
    #: Whether evicted adapters stay in host memory, because that is where they were loaded.
    caches_adapters_on_host: ClassVar[bool] = True
    #: Whether drafts may come from a model.
    runs_draft_models: ClassVar[bool] = False
    #: Whether a pass always computes the states of all tokens.
    returns_all_hidden_states: ClassVar[bool] = False
    #: Methods of `speculative_config` whose heads it runs.
    draft_head_methods: ClassVar[tuple[str, ...]] = ()
    #: Whether its runner gives `RunnerInputs.custom` to its sampler.
    runs_logits_processors: ClassVar[bool] = False
    #: Whether transfers from pinned host memory are faster.
    pins_memory: ClassVar[bool] = False
    #: Whether a step may mix prompts and decodes.
    mixes: ClassVar[bool] = True
    #: Whether a prompt is computed in one step, whose budget must then hold the longest one.
    runs_whole_prompts: ClassVar[bool] = False
    #: Whether a prompt may start with blocks that other prompts have filled. An instance may set it
    #: once it knows its model.
    caches_prefixes: bool = True
    #: Default of `max_num_batched_tokens`.
    token_budget: ClassVar[int] = 512
    #: Block size of its kernels, to which `block_size` is set; 0: any.
    block_size: ClassVar[int] = 0
    #: Keys of `additional_config` under its name that it supports.
    additional_settings: ClassVar[tuple[str, ...]] = ()
    #: Values of `kv_cache_dtype` in addition to "auto".
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.kernels = self.make_kernels()
        self._threads = Threads.from_config(config, self.kernels)

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str:
        """Why it can't be used on this machine, as a sentence; "": it can."""

    @abstractmethod
    def make_kernels(self) -> KernelSet:
        """Its kernels. Raises `ConfigError` if the settings ask for unavailable ones."""

    def build_model(self, request: BuildRequest) -> LoadedImpl:
        """Create the model of a checkpoint: the engine's own, unless the device has others.

        Raises `ModelLoadError` or `ConfigError`.
        """
        return build_model(request)

    @property
    def additional_config(self) -> dict[str, Any]:
        """Its settings in `additional_settings`."""
        return (self.config.additional_config or {}).get(self.name, {})

    @property
    def torch_device(self) -> torch.device:
        """The torch device of its tensors."""
        return self.kernels.device

    @property
    def arithmetic(self) -> tuple[str, str]:
        """Return what determines the bits of its results: the hardware and the kernels' build."""
        build = f"{self.kernels.name} {self.kernels.version}".strip()
        return self.name, f"{build}, torch {torch.__version__}"

    def prepare_adapters(self, loaded: LoadedModel) -> str:
        """Called when the model was loaded, or its weights were read again. Returns why it can't
        run adapters, or "".
        """
        return ""

    def adapter_bytes(self) -> int:
        """Bytes of memory for adapters."""
        return adapter_bytes(16, 4)

    @property
    def max_adapters(self) -> int | None:
        """Maximum number of loaded adapters, from the settings or the device; None: by memory."""
        return self.config.max_loras

    @property
    def max_adapter_rank(self) -> int | None:
        """Maximum rank of adapters, likewise."""
        return self.config.max_lora_rank

    @abstractmethod
    def num_blocks(self, need: CacheRequirements) -> int:
        """Number of KV blocks that fit into memory.

        Raises `ConfigError` if they don't suffice for one sequence.
        """

    def max_states(self, state_bytes: int) -> int | None:
        """Maximum number of running sequences with a state of that size; None: no limit."""
        return None

    def max_checkpoints(self, state_bytes: int) -> int:
        """Number of states of that size that may be saved in addition to those of running
        sequences.
        """
        return 0

    def on_cache_allocated(self, loaded: LoadedModel) -> None:
        """Called when the model has a new KV cache, before it serves requests."""

    def on_cache_released(self) -> None:
        """Called before the model's KV cache is freed."""

    def note_step(self, plan: StepPlan) -> None:
        """Called before a step is run."""

    def offload(self, tensors: Iterator[Tensor]) -> HostCopy | None:
        """Move a model's weights to host memory while it sleeps; None: they are there already."""
        return None

    def release_memory(self) -> None:
        """Return freed memory to the system, or to the device's other users.

        Raises the device's error if it is permanently lost: the process is unusable then.
        """
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)

    def synchronize(self) -> None:
        """Wait until the device has finished all launched work; a no-op if calls are
        synchronous.
        """

    def on_step_failed(self) -> None:
        """Called after a failed step, before another is tried. May raise like `release_memory`."""

    def use_threads_to_load(self) -> None:
        """Use as many threads as loading needs; CPUs are reserved for the thread that runs
        steps.
        """
        Threads(self._threads.count).use(self.kernels, torch_too=True)

    def use_threads(self, loaded: LoadedModel) -> None:
        """Apply the thread settings; called in the thread that runs steps."""
        self._threads.use(self.kernels, torch_too=True)

    @abstractmethod
    def make_runner(self, parts: RunnerInputs) -> Runner:
        """Create the runner of the model's steps."""

    def close(self) -> None:
        """Stop its threads; it isn't used any more."""
