"""`UniProcExecutor`: one device, in this process."""

from __future__ import annotations

import logging
import queue
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault
from engine.contract.messages import KV_CACHE, WEIGHTS
from engine.contract.replica_state import CACHE, KERNELS, READING, report_load_phase
from engine.devices.device import CacheRequirements, RunnerInputs
from engine.devices.host_memory import num_virtual_blocks
from engine.devices.registry import make_device
from engine.devices.threads import JoinedThread
from engine.executor.abstract import Capacity, Executor, LaunchedStep, StepFuture
from engine.executor.draft_worker import DraftWorkers
from engine.executor.lora_worker import LoraWorker
from engine.executor.sleep import SleepController
from engine.kv_cache.kv_cache_config import KVCacheConfig, make_kv_cache_config, most_blocks
from engine.model_loader.loader import LoadedModel, load_model
from engine.model_loader.vllm_config import VllmConfig
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.interface import ModelFacts
from engine.sampling.custom_processors import LogitsProcessors
from engine.sampling.logits_processor import LogitsProcessor, processor_classes
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.worker.input_batch import InputBatch
from engine.worker.interface import Attachments, BitmaskInbox, PendingStep, Runner
from kernels import KernelSet

# -- `StepThread`: runs steps one after the other while the engine prepares the next.


class StepSkipped(RuntimeError):
    """A step wasn't run, because the one before it failed."""


@dataclass(slots=True)
class _QueuedStep:
    run: Callable[[], Any]
    future: Future[Any]
    attempt: int


class StepThread:
    """A thread that runs what is submitted, in order.

    A step builds on the one before. So once one has failed, all that was or is submitted after it
    is skipped, until `resume`.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_QueuedStep | None] = queue.SimpleQueue()
        self._attempt = 0
        self._broken = False
        tell_end = partial(self._queue.put, None)
        self._thread = JoinedThread(_run_all, self._queue, name="steps", tell_end=tell_end)
        self._thread.start()
        # The thread holds neither this object nor, between steps, whoever submits them: its end is
        # theirs.
        self._end = weakref.finalize(self, tell_end)

    @property
    def alive(self) -> bool:
        """Whether it runs what is submitted."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Let the thread end after what was submitted."""
        self._end()

    def submit(self, prepare: Callable[[], Callable[[], Any]]) -> Future[Any]:
        """Call `prepare` here and now, and what it returns in the thread, after earlier steps."""
        future: Future[Any] = Future()
        if self._broken:
            future.set_exception(StepSkipped("An earlier step failed."))
            return future
        try:
            run = prepare()
        except Exception as error:  # whatever the model's inputs run into; the engine takes it back
            self._broken = True
            future.set_exception(error)
            return future
        self._queue.put(_QueuedStep(run, future, self._attempt))
        return future

    def resume(self) -> None:
        """Run again what is submitted from now on. Everything submitted before must be done."""
        self._attempt += 1
        self._broken = False


def _run_all(work: queue.SimpleQueue[_QueuedStep | None]) -> None:
    failed = -1
    while (item := work.get()) is not None:
        if item.attempt <= failed:
            item.future.set_exception(StepSkipped("An earlier step failed."))
            continue
        try:
            item.future.set_result(item.run())
        except BaseException as error:
            failed = item.attempt
            item.future.set_exception(error)
        # Lest it live until the next step comes.
        del item


log = logging.getLogger(__name__)

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


class UniProcExecutor:
    """Loads the model, allocates the KV cache and runs plans, one at a time.

    Attributes:
        device: where the model runs.
        loaded: the model and what is known of it; from `load` on.
        capacity: see `Capacity`; from `determine_available_blocks` on.
        adapters, drafts: see `Executor`.
        rank: of all ranks, of which there is one.
    """

    rank = 0
    loaded: LoadedModel
    capacity: Capacity

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        report_load_phase(KERNELS)
        self.device = make_device(config)
        self._attachments, self._masks = Attachments(), BitmaskInbox()
        self.adapters = LoraWorker(config, self.device, _KV_DTYPES)
        self.drafts = DraftWorkers(self._begin)
        self._thread: StepThread | None = None
        self._begun = self._serving = False
        self._runner: Runner = cast(Any, None)

    # -- start --------------------------------------------------------------------------------

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        """See `Executor`."""
        report_load_phase(READING)
        self.device.use_threads_to_load()
        self.loaded = load_model(self._config, self.device.kernels, progress)
        self._kv_dtype = _KV_DTYPES.get(self._config.kv_cache_dtype, self.loaded.dtype)
        self._check_logits_processors()
        self._sleeper = SleepController(self.loaded, self._config, self.device)
        self.adapters.prepare(self.loaded)
        self.drafts.load(
            self._config, self.device, self.loaded, overlaps=self.supports_async_scheduling
        )
        return self.loaded.facts

    def _check_logits_processors(self) -> None:
        """Raise `ConfigError` for logits processors that can't be used, before memory is taken."""
        classes = processor_classes(self._config, pools=self.loaded.pooler is not None)
        if classes and not self.device.runs_logits_processors:
            names = ", ".join(sorted(each.__name__ for each in classes))
            raise ConfigError(
                f"logits_processors ({names}) aren't supported on the device {self.device.name}. "
                "Leave them out; those of installed packages by QUIRE_PLUGINS.",
                param="logits_processors",
            )

    def determine_available_blocks(self) -> Capacity:
        """See `Executor`."""
        budget, layout = self._token_budget(), self._layout()
        self.drafts.check(layout)
        per_token = self._token_bytes()
        blocks, most = self._num_blocks(budget, layout), self._most_sequences()
        self.capacity = Capacity(blocks, layout, per_token, budget, most)
        block = self._token_bytes(layout.layers_per_block) * self._config.block_size
        self.drafts.size_cache(self.capacity.num_blocks, block)
        return self.capacity

    def allocate_cache(self) -> None:
        """See `Executor`."""
        report_load_phase(CACHE)
        config, layout = self._config, self.capacity.layout
        self.loaded.model.allocate_kv(
            self.capacity.num_blocks, config.block_size, self._kv_dtype, layout
        )
        batch = InputBatch(
            config.max_num_seqs,
            self.loaded.max_model_len,
            config.block_size,
            len(layout.groups),
            self._attachments,
            self.adapters.by_digest,
        )
        if self._serving:
            self.device.on_cache_allocated(self.loaded)
        self._runner = self._make_runner(batch)
        self.drafts.allocate_cache()

    def _make_runner(self, batch: InputBatch) -> Runner:
        """What runs steps on the device."""
        capacity = self.capacity
        parts = RunnerInputs(
            self.loaded,
            batch,
            self._masks,
            capacity.layout,
            capacity.token_budget,
            self.drafts.attach(batch, capacity.num_blocks, capacity.layout),
            custom=self._logits_processors(),
        )
        return self.device.make_runner(parts)

    def _logits_processors(self) -> LogitsProcessors | None:
        """The engine's own, made anew with each runner; None: there are none."""
        classes = processor_classes(self._config, pools=self.loaded.pooler is not None)
        if not classes:
            return None
        place, pinned, config = self.device.torch_device, self.device.pins_memory, self.vllm_config

        def made() -> list[LogitsProcessor]:
            return [each(config, place, pinned) for each in classes]

        return LogitsProcessors(made(), made)

    @property
    def vllm_config(self) -> VllmConfig:
        """The settings and the model's facts as vLLM has them; from `size_cache` on."""
        return VllmConfig.of(
            self._config,
            self.loaded,
            self.device.torch_device,
            num_blocks=self.capacity.num_blocks,
            token_budget=self.capacity.token_budget,
            plans_ahead=self._config.uses_async_scheduling(self.supports_async_scheduling),
        )

    def on_serving(self) -> None:
        """See `Executor`."""
        self._serving = True
        self.device.on_cache_allocated(self.loaded)

    # -- steps --------------------------------------------------------------------------------

    @property
    def supports_async_scheduling(self) -> bool:
        """See `Executor`."""
        return self.device.overlaps

    @property
    def measures_prefill_pace(self) -> bool:
        """See `Executor`."""
        return self.device.times_prompts

    @property
    def numerics_id(self) -> tuple[str, str]:
        """See `Executor`."""
        return self.device.arithmetic

    @property
    def kernels(self) -> KernelSet:
        """Of the device."""
        return self.device.kernels

    def attach(self, value: Any) -> int:
        """See `Executor`."""
        return self._attachments.add(value)

    def detach(self, handle: int) -> None:
        """See `Executor`."""
        self._attachments.remove(handle)

    def send_bitmask(self, output: GrammarOutput) -> None:
        """See `Executor`."""
        self._masks.publish(output)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor`."""
        self._begin()
        self.device.note_step(plan)
        return self._runner.execute(plan)

    def apply_plan(self, plan: StepPlan) -> None:
        """See `Executor`."""
        self._runner.prepare(plan)

    def execute_async(self, plan: StepPlan) -> StepFuture:
        """Prepare a step now and launch it in a thread, after those submitted before.

        Where the device has a queue of its own, the thread launches a step while the one before is
        under way; what comes of it is waited for by whoever asks for the result.
        """
        if self._thread is None:
            self._thread = StepThread()
        runner = self._runner
        self.device.note_step(plan)

        def prepare() -> Callable[[], PendingStep]:
            return partial(self._launch, plan, runner.prepare(plan))

        return LaunchedStep(self._thread.submit(prepare))

    def _launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        """Launch a prepared step, in the thread that does it for all."""
        self._begin()
        return self._runner.launch(plan, inputs)

    def resume(self) -> None:
        """See `Executor`."""
        self.device.on_step_failed()
        self._runner.reset()
        self._masks.clear()
        if self._thread is not None:
            self._thread.resume()

    def _begin(self) -> None:
        """Take over the thread settings, once; in the thread that runs steps."""
        if not self._begun:
            self._begun = True
            self.device.use_threads(self.loaded)

    # -- for operators ------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """See `Executor`."""
        return bool(self._sleeper.asleep)

    def check_sleep(self) -> None:
        """See `Executor`."""
        self._sleeper.check()

    def sleep(self, level: int) -> None:
        """See `Executor`, and `SleepController` for the levels."""
        self.check_sleep()
        # Graphs and their buffers go with the runner: they hold addresses of what goes.
        self._runner = cast(Any, None)
        self.device.on_cache_released()
        self.drafts.sleep(level)
        self._sleeper.sleep(level)
        self.adapters.clear_host()

    def wake_up(self, tags: Collection[str]) -> None:
        """See `Executor`. The KV cache comes after the weights, whichever is woken first."""
        asleep = self._sleeper.asleep
        if WEIGHTS in tags:
            self._sleeper.reload_weights()
            self.adapters.prepare(self.loaded)
            self.drafts.wake_weights()
        if KV_CACHE in tags:
            asleep.discard(KV_CACHE)
        if not asleep and self._runner is None:
            self.allocate_cache()

    def check_health(self) -> None:
        """See `Executor`."""
        if self._thread is not None and not self._thread.alive:
            raise EngineFault("The thread that runs steps has ended.")

    def shutdown(self) -> None:
        """See `Executor`."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self.device.close()
        self._runner = cast(Any, None)

    # -- sizes --------------------------------------------------------------------------------

    def _layout(self) -> KVCacheConfig:
        """The model's KV cache groups."""
        spec = self.loaded.spec
        hybrid = not self._config.disable_hybrid_kv_cache_manager
        windows, layers = spec.sliding_windows, spec.num_layers
        if isinstance(spec, DecoderSpec):
            windows, layers = spec.kv_windows, len(spec.attention_layers)
        return make_kv_cache_config(windows, layers, self.loaded.max_model_len, hybrid)

    def _token_bytes(self, num_layers: int | None = None) -> int:
        """Bytes of KV cache of one token over `num_layers` layers, by default all."""
        spec = self.loaded.spec
        size = spec.kv_bytes_per_token(self._kv_dtype.itemsize, num_layers)
        if self._kv_dtype != torch.int8:
            return size
        if not isinstance(spec, DecoderSpec):
            raise ConfigError(
                f"kv_cache_dtype='int8' isn't done for {spec.architecture}.", param="kv_cache_dtype"
            )
        return size + size // spec.head_dim * torch.float32.itemsize  # each head's scale

    def _num_blocks(self, token_budget: int, layout: KVCacheConfig) -> int:
        """The pool's size: a block holds `layers_per_block` layers, whatever their group."""
        config, longest = self._config, self.loaded.max_model_len
        most = sum(
            most_blocks(window, longest, token_budget, config.block_size)
            for window in layout.windows
        )
        token_bytes = self._token_bytes(layout.layers_per_block)
        token_bytes += self.drafts.bytes_per_token
        if token_bytes == 0:
            return num_virtual_blocks(config, token_budget)
        return self.device.num_blocks(
            CacheRequirements(
                self.loaded,
                self._kv_dtype,
                layout,
                token_bytes,
                most,
                token_budget,
                self.drafts.need,
                self.drafts.taps,
            )
        )

    def _most_sequences(self) -> int | None:
        """Sequences whose states are held at once; None: nothing is carried."""
        size: int = getattr(self.loaded.spec, "state_bytes", 0)
        most = self.device.max_states(size) if size else None
        if most is None:
            return None
        wanted = self._config.max_num_seqs
        if most < wanted:
            log.info(
                "%d sequences run at once, not %d: each carries a state of %d bytes.",
                most, wanted, size,
            )  # fmt: skip
        return min(most, wanted)

    def _token_budget(self) -> int:
        """`max_num_batched_tokens`: without chunked prefill a whole prompt must fit."""
        budget = self._config.max_num_batched_tokens
        if budget is None:
            budget = self.device.token_budget
            if not isinstance(self.loaded.model, NativeDecoder):
                budget = min(budget, _OTHERS_TOKEN_BUDGET)
        if not self._config.enable_chunked_prefill or self.loaded.runs_whole_prompts:
            budget = max(budget, self.loaded.max_model_len)
        return budget


# -- The executor that the settings ask for.


def unwrap_uniproc(executor: Executor) -> UniProcExecutor:
    """`executor`, for those who look at the model itself: benchmarks and surveys.

    Raises TypeError where the model isn't in this process.
    """
    if not isinstance(executor, UniProcExecutor):
        raise TypeError(f"{type(executor).__name__} runs no model in this process.")
    return executor


def make_executor(config: EngineConfig) -> Executor:
    """One that runs the model in this process.

    Raises `ConfigError` for a device that isn't there.
    """
    return UniProcExecutor(config)
