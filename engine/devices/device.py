"""`Device`: where a model runs, and all that the engine must know of it.

The engine never asks which device it has, only what the device can do. A new one is a subclass,
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

#: Counts changes of `Device` and `Runner` that a package must follow. A device names the version it
#: was written for; another one is refused by name before anything is loaded.
CONTRACT_VERSION = 1


def adapter_bytes(part: int, max_gib: int) -> int:
    """A fraction 1/`part` of the free memory for adapters, at most so many GiB."""
    return min(available_memory() // part, max_gib * GIB)


#: Maximum fraction of the target's KV cache that a draft model's KV cache may take.
DRAFT_CACHE_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class CacheRequirements:
    """What a model asks of a device's memory for its KV cache.

    Attributes:
        loaded: the model; its cache isn't allocated yet.
        dtype: of keys and values.
        layout: its KV cache groups.
        bytes_per_token: of the layers that a block holds.
        blocks_per_sequence: that a sequence of full length takes.
        token_budget: of a step.
        draft: what its draft model asks for beside it; None: it has none.
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
    """What a runner is made of.

    Attributes:
        loaded: the model, with its KV cache.
        batch: holds no sequence yet.
        masks: where grammars' masks come.
        layout, token_budget: as in `CacheRequirements`.
        hidden: keeps what tokens were drawn from, for heads; None: there are none.
        is_draft: it draws drafts for another model beside it.
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

    Raises `ConfigError` where they ask for what it can't do.
    """

    #: As `--device` names it.
    name: ClassVar[str]
    #: The `CONTRACT_VERSION` that it was written for.
    contract_version: ClassVar[int] = 1
    #: Steps are planned while the previous one runs, unless `async_scheduling` says otherwise.
    overlaps: ClassVar[bool] = False
    #: Prompts are timed at the start, so that they leave room for others' decodes: worth it where
    #: a chunk of a prompt takes much longer than a decode.
    times_prompts: ClassVar[bool] = False
    #: Whether rows of a step may use LoRA adapters.
    runs_adapters: ClassVar[bool] = False
    #: Whether adapters that leave it are kept as they are, since host memory is where they were.
    caches_adapters_on_host: ClassVar[bool] = True
    #: Whether drafts may come from a model.
    runs_draft_models: ClassVar[bool] = False
    #: Whether a pass always computes the states of all tokens.
    returns_all_hidden_states: ClassVar[bool] = False
    #: Methods of `speculative_config` whose heads it runs.
    draft_head_methods: ClassVar[tuple[str, ...]] = ()
    #: Whether its runner gives `RunnerInputs.custom` to its sampler.
    runs_logits_processors: ClassVar[bool] = False
    #: Whether host memory that is pinned gets to it sooner.
    pins_memory: ClassVar[bool] = False
    #: Whether a step may hold prompts and decodes; else it holds one or the other.
    mixes: ClassVar[bool] = True
    #: Whether a prompt is computed in one step, which then has room for the longest.
    runs_whole_prompts: ClassVar[bool] = False
    #: Whether a prompt may start with blocks that others' prompts have filled. An instance may set
    #: it when it knows its model.
    caches_prefixes: bool = True
    #: `max_num_batched_tokens` by default.
    token_budget: ClassVar[int] = 512
    #: Tokens of a block where its kernels have blocks of one size, to which `block_size` is set;
    #: 0: any.
    block_size: ClassVar[int] = 0
    #: Keys of `additional_config` under its name that it takes.
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
        """Why it can't be used here, as a sentence; "" when it can."""

    @abstractmethod
    def make_kernels(self) -> KernelSet:
        """Its kernels. Raises `ConfigError` where the settings ask for others than there are."""

    def build_model(self, request: BuildRequest) -> LoadedImpl:
        """Make the model of a checkpoint: the engine's own, unless the device brings others.

        Raises `ModelLoadError` or `ConfigError`.
        """
        return build_model(request)

    @property
    def additional_config(self) -> dict[str, Any]:
        """Its own settings, of `additional_settings`."""
        return (self.config.additional_config or {}).get(self.name, {})

    @property
    def torch_device(self) -> torch.device:
        """The torch device of its tensors."""
        return self.kernels.device

    @property
    def arithmetic(self) -> tuple[str, str]:
        """What determines the bits of its results: the kind of hardware, and the kernels' build."""
        build = f"{self.kernels.name} {self.kernels.version}".strip()
        return self.name, f"{build}, torch {torch.__version__}"

    def prepare_adapters(self, loaded: LoadedModel) -> str:
        """The model was loaded, or its weights were read anew, and may be asked to run adapters:
        why it can't here, or "".
        """
        return ""

    def adapter_bytes(self) -> int:
        """Memory for adapters."""
        return adapter_bytes(16, 4)

    @property
    def max_adapters(self) -> int | None:
        """Of the settings, or how many the device can have at once; None: as many as fit."""
        return self.config.max_loras

    @property
    def max_adapter_rank(self) -> int | None:
        """The same for their ranks."""
        return self.config.max_lora_rank

    @abstractmethod
    def num_blocks(self, need: CacheRequirements) -> int:
        """Blocks of KV cache that there is room for.

        Raises `ConfigError` where there isn't enough for one sequence.
        """

    def max_states(self, state_bytes: int) -> int | None:
        """Sequences that run at once where each carries a state of that size; None: no bound."""
        return None

    def max_checkpoints(self, state_bytes: int) -> int:
        """Number of states of that size that may be saved in addition to those of running
        sequences.
        """
        return 0

    def on_cache_allocated(self, loaded: LoadedModel) -> None:
        """The model has a new KV cache, and serves requests from now on."""

    def on_cache_released(self) -> None:
        """The model's KV cache goes."""

    def note_step(self, plan: StepPlan) -> None:
        """A step is about to be run."""

    def offload(self, tensors: Iterator[Tensor]) -> HostCopy | None:
        """Move a model's weights to host memory while it sleeps; None: that's where they are."""
        return None

    def release_memory(self) -> None:
        """Hand freed memory to the system, or to the device's other users.

        Raises what a device says that is lost for good: the process is of no use any more.
        """
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)

    def synchronize(self) -> None:
        """Wait until the device has done what was launched; where calls wait, that is done."""

    def on_step_failed(self) -> None:
        """A step failed; another will be tried. May raise, as `release_memory`."""

    def use_threads_to_load(self) -> None:
        """All threads that the load needs; CPUs are for the thread that will run steps."""
        Threads(self._threads.count).use(self.kernels, torch_too=True)

    def use_threads(self, loaded: LoadedModel) -> None:
        """Take over the thread settings; called in the thread that runs steps."""
        self._threads.use(self.kernels, torch_too=True)

    @abstractmethod
    def make_runner(self, parts: RunnerInputs) -> Runner:
        """Create the runner of the model's steps."""

    def close(self) -> None:
        """End its threads; it isn't used any more."""
