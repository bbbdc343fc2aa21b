"""`SingleExecutor`: one device, in this process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import torch

import kernels
from engine.config import EngineConfig
from engine.device import kernels_for
from engine.errors import ConfigError
from engine.executor.memory import num_counted_blocks, num_cpu_blocks
from engine.executor.outcome import Launched, Outcome
from engine.executor.pages_ahead import PagesAhead
from engine.executor.sleep import Sleeper, give_back_memory
from engine.executor.step_thread import StepThread
from engine.executor.threads import Threads
from engine.kv_cache.layout import KVLayout, make_layout, most_blocks
from engine.models.decoder import NativeDecoder
from engine.models.loader import LoadedModel, load_model
from engine.models.spec import DecoderSpec
from engine.pooling.runner import PoolingRunner
from engine.protocol import KV_CACHE, WEIGHTS
from engine.sampling.sampler import Sampler
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.batch import RunningBatch
from engine.worker.cuda.forward import DeviceForward
from engine.worker.cuda.memory import CudaMeter, DeviceMemory, num_gpu_blocks
from engine.worker.cuda.profile import profile
from engine.worker.cuda.runner import DeviceRunner
from engine.worker.cuda.setup import DeviceModel, capture, device_forward, device_of
from engine.worker.decode import DecodeSteps, tables_of
from engine.worker.runner import ModelRunner

log = logging.getLogger(__name__)

CPU_TOKEN_BUDGET = 512
GPU_TOKEN_BUDGET = 8192
#: Of models that aren't ours: a bridged one makes the logits of every token that is asked for.
_OTHERS_TOKEN_BUDGET = 2048
_KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class SingleExecutor:
    """Loads the model, allocates the KV cache and runs plans, one at a time.

    Attributes:
        loaded: the model and what is known of it.
        layout: the model's KV cache groups.
        num_blocks: size of the KV pool.
        kv_bytes_per_token: what a token takes of it, over all layers.
        token_budget: max_num_batched_tokens, resolved.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None]) -> None:
        self._ops = kernels_for(config)
        self._threads = Threads.of(config, self._ops)
        self._begun = False
        self._config = config
        self._kept_for_graphs: int | None = None
        # All that the load needs; CPUs are for the thread that will run steps.
        Threads(self._threads.count).use(self._ops, torch_too=True)
        self.loaded: LoadedModel = load_model(config, progress)
        self.device = device_of(self.loaded.model)
        self.token_budget = self._token_budget(config)
        kv_dtype = _KV_DTYPES.get(config.kv_cache_dtype, self.loaded.dtype)
        self.kv_bytes_per_token = self._token_bytes(kv_dtype)
        self.layout = self._layout(config)
        self.num_blocks = self._num_blocks(config, kv_dtype)
        self._kv_dtype = kv_dtype
        self._thread: StepThread | None = None
        self._sleeper = Sleeper(self.loaded, config, self.device)
        self._pages: PagesAhead | None = None
        self._maps_ahead = False
        self._runner = self._allocate()

    def _allocate(self) -> ModelRunner | PoolingRunner:
        """Make the KV cache, and a runner on it that holds no sequence."""
        config = self._config
        self.loaded.model.allocate_kv(
            self.num_blocks, config.block_size, self._kv_dtype, self.layout
        )
        batch = RunningBatch(
            config.max_num_seqs,
            self.loaded.max_model_len,
            config.block_size,
            len(self.layout.groups),
        )
        if self._maps_ahead:
            self.map_ahead()
        return self._make_runner(batch, config)

    def map_ahead(self) -> None:
        """From now on, map pages of a CPU's KV cache before they are needed."""
        self._maps_ahead = True
        model, ahead = self.loaded.model, self._config.kv_cache_map_ahead << 20
        if ahead and self.device.type == "cpu" and isinstance(model, NativeDecoder):
            caches = {id(kept): kept for cache in model.kv_caches for kept in cache}
            tensors = [kept for kept in caches.values() if kept is not None]
            self._pages = PagesAhead(self._ops, tensors, ahead)
            weakref.finalize(self, self._pages.close, wait_s=0.0)

    @property
    def asleep(self) -> bool:
        """Whether some of the memory is given back: no step can be run."""
        return bool(self._sleeper.asleep)

    def check_sleep(self) -> None:
        """Raise `ConfigError` unless this model can sleep."""
        self._sleeper.check()

    def sleep(self, level: int) -> None:
        """Give memory back, see `Sleeper`. No step may be under way, and all sequences are lost."""
        self.check_sleep()
        # Graphs and their buffers go with the runner: they hold addresses of what goes.
        self._runner = cast(Any, None)
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        self._sleeper.sleep(level)

    def wake_up(self, tags: Collection[str]) -> None:
        """Take the memory again; once nothing sleeps any more, steps can be run.

        The KV cache comes after the weights, whichever of them is woken first. Raises
        `ModelLoadError` where the weights can't be read any more; then they still sleep.
        """
        asleep = self._sleeper.asleep
        if WEIGHTS in tags:
            self._sleeper.wake_weights()
        if KV_CACHE in tags:
            asleep.discard(KV_CACHE)
        if not asleep and self._runner is None:
            self._runner = self._allocate()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; the batch stays usable."""
        if not self._begun:
            self._begin()
        if self._pages is not None:
            self._pages.note(plan)
        return self._runner.execute(plan)

    def prepare(self, plan: StepPlan) -> None:
        """Take over the changes of a plan that holds no sequence."""
        self._runner.prepare(plan)

    def submit(self, plan: StepPlan) -> Outcome:
        """Prepare a step now and run it in a thread, after those submitted before.

        At most one other may be unfinished. After one has failed, all are skipped (`StepSkipped`)
        until `resume`. On a GPU the thread launches a step while the one before is under way; what
        comes of it is waited for by whoever asks for the result.
        """
        if self._thread is None:
            self._thread = StepThread()
        runner: Any = self._runner  # one kind of runner or the other, its inputs its own
        if self._pages is not None:
            self._pages.note(plan)

        def prepare() -> Callable[[], StepResult]:
            return partial(self._run, plan, runner.prepare(plan))

        future = self._thread.submit(prepare)
        return Launched(future) if isinstance(runner, DeviceRunner) else future

    def _run(self, plan: StepPlan, inputs: Any) -> Any:
        """Run or launch a prepared step, in the thread that does it for all."""
        if not self._begun:
            self._begin()
        runner = self._runner
        if isinstance(runner, DeviceRunner):
            return runner.launch(plan, inputs)
        return runner.run(plan, inputs)

    def resume(self) -> None:
        """Run submitted steps again after one has failed; all must be done.

        Raises what a GPU says that is lost for good: then this process is of no use any more.
        """
        if self.device.type != "cpu":
            # Memory that lies idle in pieces may be what the step ran out of.
            give_back_memory(self.device)
        if isinstance(self._runner, DeviceRunner):
            self._runner.forget()
        if self._thread is not None:
            self._thread.resume()

    def _begin(self) -> None:
        """Take over the thread settings; in the thread that runs steps."""
        self._begun = True
        on_kernels = isinstance(self.loaded.model, NativeDecoder) and self.device.type == "cpu"
        self._threads.use(self._ops, torch_too=not on_kernels)

    @property
    def kernels(self) -> kernels.KernelSet:
        """Of the device."""
        return self._ops

    def _make_runner(
        self, batch: RunningBatch, config: EngineConfig
    ) -> ModelRunner | PoolingRunner:
        """What runs steps: by whether the model continues prompts or pools them."""
        if self.loaded.pooler is not None:
            return PoolingRunner(self.loaded.model, batch, self.loaded.pooler, self.device)
        compiled = config.compiled_sampling and self._ops.name != "reference"
        chooser = self._ops if compiled else None
        sampler = Sampler(self.loaded.eos_token_ids, chooser)
        if self.device.type != "cuda":
            return ModelRunner(self.loaded.model, batch, sampler, self._decodes(batch, sampler))
        groups = len(self.layout.groups)
        model = cast(DeviceModel, self.loaded.model)
        forward = device_forward(model, config, self.token_budget, self._longest, groups)
        capture(forward, CudaMeter(self.device), self._kept_for_graphs)
        batch.decodes_first = config.split_mixed_batches
        return DeviceRunner(model, batch, sampler, forward, self.device)

    def _decodes(self, batch: RunningBatch, sampler: Sampler) -> DecodeSteps | None:
        """What runs decode steps in one call, where model and kernels can."""
        model = self.loaded.model
        if not self._config.compiled_step or not isinstance(model, NativeDecoder):
            return None
        step = model.compile_step(tables_of(batch))
        if step is None:
            return None
        return DecodeSteps(step, batch, sampler, model.spec.vocab_size)

    def _layout(self, config: EngineConfig) -> KVLayout:
        """The model's KV cache groups."""
        spec = self.loaded.spec
        hybrid = not config.disable_hybrid_kv_cache_manager
        return make_layout(spec.windows, spec.num_layers, self.loaded.max_model_len, hybrid)

    def _token_bytes(self, dtype: torch.dtype, num_layers: int | None = None) -> int:
        """Bytes of KV cache of one token over `num_layers` layers, by default all."""
        spec = self.loaded.spec
        size = spec.kv_bytes_per_token(dtype.itemsize, num_layers)
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and self.device.type != "cuda":
            raise ConfigError("A KV cache in fp8 needs a GPU.", param="kv_cache_dtype")
        if dtype != torch.int8:
            return size
        if not isinstance(spec, DecoderSpec):
            raise ConfigError(
                f"kv_cache_dtype='int8' isn't done for {spec.architecture}.", param="kv_cache_dtype"
            )
        return size + size // spec.head_dim * torch.float32.itemsize  # each head's scale

    def _num_blocks(self, config: EngineConfig, dtype: torch.dtype) -> int:
        """The pool's size: a block holds `layers_per_block` layers, whatever their group."""
        layout, longest = self.layout, self.loaded.max_model_len
        most = sum(
            most_blocks(window, longest, self.token_budget, config.block_size)
            for window in layout.windows
        )
        token_bytes = self._token_bytes(dtype, layout.layers_per_block)
        if token_bytes == 0:
            return num_counted_blocks(config, self.token_budget)
        if self.device.type == "cuda" and config.num_gpu_blocks_override is None:
            memory = self._profile(config, dtype)
            self._kept_for_graphs = memory.graphs
            return num_gpu_blocks(
                memory,
                config.gpu_memory_utilization,
                token_bytes * config.block_size,
                config.max_num_seqs * most,
                len(layout.groups),
            )
        return num_cpu_blocks(config, token_bytes, most, least=len(layout.groups))

    def _profile(self, config: EngineConfig, dtype: torch.dtype) -> DeviceMemory:
        """What the model takes of the GPU beside its KV cache."""
        model = cast(DeviceModel, self.loaded.model)
        budget, longest, layout = self.token_budget, self._longest, self.layout
        meter = CudaMeter(self.device)

        def make_forward() -> DeviceForward | None:
            if self.loaded.pooler is not None:
                return None
            return device_forward(model, config, budget, longest, len(layout.groups))

        return profile(model, config, budget, longest, dtype, layout, meter, make_forward)

    @property
    def _longest(self) -> int:
        """Blocks of a sequence of full length."""
        return -(-self.loaded.max_model_len // self._config.block_size)

    def _token_budget(self, config: EngineConfig) -> int:
        """`max_num_batched_tokens`: without chunked prefill a whole prompt must fit."""
        budget = config.max_num_batched_tokens
        if budget is None:
            budget = GPU_TOKEN_BUDGET if self.device.type == "cuda" else CPU_TOKEN_BUDGET
            if not isinstance(self.loaded.model, NativeDecoder):
                budget = min(budget, _OTHERS_TOKEN_BUDGET)
        if not config.enable_chunked_prefill or self.loaded.runs_whole_prompts:
            budget = max(budget, self.loaded.max_model_len)
        return budget
