"""`Worker`: one rank's model on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.messages import KV_CACHE, WEIGHTS
from engine.contract.replica_state import CACHE, KERNELS, READING, Numerics, report_load_phase
from engine.devices.device import CacheRequirements, RunnerInputs
from engine.devices.host_memory import num_virtual_blocks
from engine.devices.registry import make_device
from engine.distributed.memory import RankMemory
from engine.distributed.parallel_state import parse_partition
from engine.distributed.pipeline import PipelineStage, StageSockets
from engine.distributed.tensor_exchange import TensorExchange
from engine.executor.abstract import Capacity
from engine.executor.draft_worker import DraftWorkers
from engine.executor.expert_balancer import ExpertBalancer
from engine.executor.kv_transfer import KVTransfer, make_kv_transfer
from engine.executor.lora_worker import LoraWorker
from engine.executor.numerics import read_numerics
from engine.executor.sleep import SleepController
from engine.kv_cache.kv_cache_config import (
    KVCacheConfig,
    make_kv_cache_config,
    with_cross_attention,
)
from engine.model_loader.loader import LoadedModel, load_model
from engine.model_loader.vllm_config import VllmConfig
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.interface import ModelFacts, SupportsMultiModal
from engine.models.rotary_embedding import MAX_PLANE_ROWS
from engine.models.sharding import PARAM, num_kv_copies, num_state_copies
from engine.sampling.custom_processors import LogitsProcessors
from engine.sampling.logits_processor import LogitsProcessor, processor_classes
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.worker.encoder_runner import EncoderRunner, EncodingRunner
from engine.worker.input_batch import InputBatch
from engine.worker.interface import Attachments, BitmaskInbox, PendingStep, Runner
from engine.worker.model_runner import ModelRunner
from engine.worker.timed_runner import TimedRunner
from kernels import KernelSet
from kernels.interface import RankGroup

log = logging.getLogger(__name__)

#: Default token budget of models other than `NativeDecoder`: a Transformers model computes logits
#: for every token of a step.
_OTHER_MODELS_TOKEN_BUDGET = 2048
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def _join_ranks(memory: RankMemory, ops: KernelSet, exchange: TensorExchange | None) -> RankGroup:
    """Raises `ConfigError` for kernels that don't support several ranks."""
    try:
        return memory.join(ops, exchange=exchange)
    except ValueError as error:
        size = memory.state.tensor_parallel_size
        raise ConfigError(f"{PARAM}={size} can't be used: {error}.", param=PARAM) from error


class Worker:
    """Loads a model, sizes and allocates its KV cache, and runs its steps on one device.

    It takes and returns plain data (`ModelFacts`, `Capacity`, `StepPlan`, `StepResult`), so an
    executor may run it in this process or elsewhere. `load`, `determine_available_blocks` and
    `allocate_cache` are called once, in this order.

    Attributes:
        ranks: the ranks that share the tensors of layers, including this one; None: it has all of
            them.
        stage: its pipeline stage; None: it has all layers.
        expert_ranks: the ranks that have nothing but the experts in common; None: there are none.
        device: the device of the model.
        loaded: the model; set by `load`.
        capacity: set by `determine_available_blocks`.
        adapters, drafts: what is on the device in addition to the model.
    """

    loaded: LoadedModel
    capacity: Capacity

    def __init__(
        self,
        config: EngineConfig,
        memory: RankMemory | None = None,
        stage_sockets: StageSockets | None = None,
        expert_memory: RankMemory | None = None,
    ) -> None:
        """`memory`: shared by the ranks of the model; None: this is the only rank. `stage_sockets`:
        connections to the ranks of other stages. `expert_memory`: shared by ranks that have the
        model's experts alone in common; None: there are none.

        Raises `ConfigError` for a device that isn't available or doesn't support ranks.
        """
        self._config = config
        report_load_phase(KERNELS)
        self.device = make_device(config)
        self._memory, self.ranks, self.stage = memory, None, None
        self._exchange: TensorExchange | None = None
        self._balancer: ExpertBalancer | None = None
        if memory is not None and memory.state.tensor_parallel_size > 1:
            if stage_sockets is not None and stage_sockets.tensors:
                self._exchange = TensorExchange(memory, stage_sockets.tensors)
            self.ranks = _join_ranks(memory, self.device.kernels, self._exchange)
        if memory is not None and memory.state.pipeline_parallel_size > 1:
            partition = config.pipeline_layer_partition
            self.stage = PipelineStage(
                memory,
                stage_sockets or StageSockets(),
                parse_partition(partition, config.pipeline_parallel_size) if partition else (),
            )
        self.expert_ranks: RankGroup | None = None
        if expert_memory is not None:
            self.expert_ranks = _join_ranks(expert_memory, self.device.kernels, None)
        #: Entered while the model computes.
        self.forward_scope: AbstractContextManager[None] = nullcontext()
        self._attachments, self._masks = Attachments(), BitmaskInbox()
        self.adapters = LoraWorker(config, self.device, _DTYPES)
        self.drafts = DraftWorkers(self._use_threads)
        self._is_serving = self._threads_set = False
        self._runner: Runner = cast(Any, None)
        self.kv_transfer: KVTransfer | None = None
        #: The runner's encoder; None: it has none.
        self._encoder: EncoderRunner | None = None

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        """Load the model; `progress(done, total)` is called meanwhile.

        Raises `ModelLoadError` or `ConfigError`.
        """
        report_load_phase(READING)
        self.device.use_threads_to_load()
        self.loaded = load_model(
            self._config,
            self.device.kernels,
            progress,
            self.ranks,
            self.device.build_model,
            stage=self.stage,
            expert_ranks=self.expert_ranks,
        )
        self._kv_dtype = _DTYPES.get(self._config.kv_cache_dtype, self.loaded.dtype)
        model, eplb = self.loaded.model, self._config.eplb
        if eplb is not None:
            if not isinstance(model, NativeDecoder) or model.full_spec.moe is None:
                raise ConfigError(
                    f"enable_eplb can't be used: {self.loaded.spec.architecture} has no experts.",
                    param="enable_eplb",
                )
            self._balancer = ExpertBalancer(self.loaded, eplb)
        self._check_logits_processors()
        self._sleeper = SleepController(self.loaded, self._config, self.device)
        self.adapters.prepare(self.loaded)
        self.drafts.load(
            self._config,
            self.device,
            self.loaded,
            overlaps=self.supports_async_scheduling,
            is_first_rank=self.rank == 0,
        )
        return self.loaded.facts

    @property
    def rank(self) -> int:
        """This worker's rank in the model."""
        return 0 if self._memory is None else self._memory.state.rank

    @property
    def collective_s(self) -> float:
        """Seconds that this rank has waited for ranks that share layers with it."""
        groups = (self.ranks, self.expert_ranks)
        return sum(group.waited_s for group in groups if group is not None)

    @torch.inference_mode()
    def join_forward(self) -> None:
        """Take part in a forward pass of other ranks, which may choose experts of this one."""
        cast(NativeDecoder, self.loaded.model).join_experts()

    def fail_ranks(self) -> None:
        """Mark the ranks as failed: none waits for another until all are reset."""
        if self._memory is not None:
            self._memory.set_failed(True)
        for group in (self.ranks, self.expert_ranks):
            if group is not None:
                group.fail()

    def reset_ranks(self) -> None:
        """Reset the rank group after a failure; see `RankGroup.reset`."""
        if self.ranks is not None:
            self.ranks.reset()
        if self.stage is not None:
            self.stage.reset()

    def close_connections(self) -> None:
        """Close the connections to other ranks: nothing is sent or received any more."""
        if self.stage is not None:
            self.stage.close()
        if self._exchange is not None:
            self._exchange.close()

    def _logits_processor_classes(self) -> list[type[LogitsProcessor]]:
        return processor_classes(
            self._config,
            pools=self.loaded.pooler is not None,
            model_classes=self.loaded.facts.logits_processors,
        )

    def _check_logits_processors(self) -> None:
        """Raise `ConfigError` for unusable logits processors before memory is allocated."""
        classes = self._logits_processor_classes()
        if classes and not self.device.runs_logits_processors:
            names = ", ".join(sorted(cls.__name__ for cls in classes))
            raise ConfigError(
                f"logits_processors ({names}) aren't supported on the device {self.device.name}. "
                "Leave them out; those of installed packages by QUIRE_PLUGINS.",
                param="logits_processors",
            )

    def determine_available_blocks(self) -> Capacity:
        """Size the KV cache by the free memory. Raises `ConfigError` if there isn't enough."""
        config, budget, layout = self._config, self._token_budget(), self._layout()
        self.drafts.check(layout)
        token_bytes = self._token_bytes(self._layers_per_block(layout))
        num_blocks = self._num_blocks(budget, layout, token_bytes)
        max_stateful, spec = self._max_stateful_sequences(), self.loaded.spec
        if isinstance(spec, DecoderSpec) and spec.states is not None and max_stateful is not None:
            # A prefix ends with a block of keys and values, so more checkpoints than those are
            # useless.
            num_checkpoints = min(num_blocks, self.device.max_checkpoints(self._state_bytes()))
            layout = layout.with_states(max_stateful + num_checkpoints)
        self.capacity = Capacity(
            num_blocks=num_blocks,
            layout=layout,
            kv_bytes_per_token=self._token_bytes(),
            token_budget=budget,
            max_stateful_sequences=max_stateful,
            mixes=self.device.mixes,
            runs_whole_prompts=self.device.runs_whole_prompts,
            caches_prefixes=self.device.caches_prefixes and not config.only_encodes,
        )
        self.drafts.size_cache(self.capacity.num_blocks, token_bytes * config.block_size)
        return self.capacity

    def set_capacity(self, capacity: Capacity) -> None:
        """Use the first rank's number of blocks instead of sizing the KV cache."""
        self.capacity = capacity

    def _layout(self) -> KVCacheConfig:
        spec = self.loaded.spec
        hybrid = not self._config.disable_hybrid_kv_cache_manager
        windows, layers = spec.sliding_windows, spec.num_layers
        if isinstance(spec, DecoderSpec):
            windows, layers = spec.kv_windows, len(spec.attention_layers)
        layout = make_kv_cache_config(windows, layers, self.loaded.max_model_len, hybrid)
        if isinstance(spec, DecoderSpec) and spec.cross is not None:
            return with_cross_attention(layout, spec.cross.length)
        return layout

    def _layers_per_block(self, layout: KVCacheConfig) -> int:
        """Layer slots per block over all stages: each has those that its layers need."""
        model = self.loaded.model
        if self.stage is None or not isinstance(model, NativeDecoder):
            return layout.layers_per_block
        return sum(len(slots) for slots in model.slots_by_stage(layout))

    def _token_bytes(self, num_layers: int | None = None) -> int:
        """Bytes of KV cache per token for `num_layers` layers, by default all."""
        spec = self.loaded.spec
        size = spec.kv_bytes_per_token(self._kv_dtype.itemsize, num_layers)
        if self.ranks is not None and not self._config.deals_tokens:
            # The memory of all ranks together; a bridged model's spec is that of this one.
            copies = self.ranks.size
            if isinstance(spec, DecoderSpec):
                copies = num_kv_copies(spec, copies)
            size *= copies
        if self._kv_dtype != torch.int8:
            return size
        if not isinstance(spec, DecoderSpec):
            raise ConfigError(
                f"kv_cache_dtype='int8' isn't supported for {spec.architecture}.",
                param="kv_cache_dtype",
            )
        return size + size // spec.head_dim * torch.float32.itemsize  # a scale for each head

    def _num_blocks(self, token_budget: int, layout: KVCacheConfig, token_bytes: int) -> int:
        """The pool's size: a block holds `layers_per_block` layers of any group."""
        config, max_model_len = self._config, self.loaded.max_model_len
        blocks_per_sequence = layout.max_blocks(max_model_len, token_budget, config.block_size)
        # Every rank holds the cache of all heads.
        num_ranks = 1 if self.ranks is None else self.ranks.size
        token_bytes += self.drafts.bytes_per_token * num_ranks
        if token_bytes == 0:
            return num_virtual_blocks(config, token_budget)
        if config.only_encodes:
            return num_virtual_blocks(config, token_budget) + blocks_per_sequence
        requirements = CacheRequirements(
            self.loaded,
            self._kv_dtype,
            layout,
            token_bytes,
            blocks_per_sequence,
            token_budget,
            self.drafts.need,
            self.drafts.taps,
        )
        return self.device.num_blocks(requirements)

    def _state_bytes(self) -> int:
        """Bytes of a sequence's states in all ranks together."""
        spec = self.loaded.spec
        size: int = getattr(spec, "state_bytes", 0)
        if self.ranks is not None and isinstance(spec, DecoderSpec):
            size *= num_state_copies(spec, self.ranks.size)
        return size

    def _max_stateful_sequences(self) -> int | None:
        """Number of sequences whose states fit into memory; None: sequences have no states."""
        size = self._state_bytes()
        max_states = self.device.max_states(size) if size else None
        if max_states is None:
            return None
        max_num_seqs = self._config.max_num_seqs
        if max_states < max_num_seqs:
            log.info(
                "%d sequences run at once, not %d: each has a state of %d bytes.",
                max_states, max_num_seqs, size,
            )  # fmt: skip
        return min(max_states, max_num_seqs)

    def _token_budget(self) -> int:
        """`max_num_batched_tokens`: without chunked prefill a complete prompt must fit."""
        budget = self._config.max_num_batched_tokens
        if budget is None:
            budget = self.device.token_budget
            if not isinstance(self.loaded.model, NativeDecoder):
                budget = min(budget, _OTHER_MODELS_TOKEN_BUDGET)
        in_one_step = self.device.runs_whole_prompts or self.loaded.runs_whole_prompts
        if not self._config.enable_chunked_prefill or in_one_step:
            budget = max(budget, self.loaded.max_model_len)
        rope = self.loaded.spec.rope
        if rope is not None and rope.planes and budget > MAX_PLANE_ROWS:
            raise ConfigError(
                f"A step of a model whose tokens have three positions has at most {MAX_PLANE_ROWS} "
                f"tokens; max_num_batched_tokens is {budget}.",
                param="max_num_batched_tokens",
            )
        span = getattr(self.loaded.model, "bidirectional_span", 0)
        if (chunk := min(budget, self._config.long_prefill_token_threshold or budget)) < span:
            raise ConfigError(
                f"A step must be able to compute the {span} tokens of an image, which see each "
                f"other; got {chunk} (max_num_batched_tokens, long_prefill_token_threshold).",
                param="max_num_batched_tokens",
            )
        return budget

    def allocate_cache(self) -> None:
        """Allocate the KV cache and create the runner; steps can be run from now on."""
        report_load_phase(CACHE)
        config, layout = self._config, self.capacity.layout
        # Without a decoder the scheduler only counts blocks; one shows their layout to the tiers.
        num_blocks = 1 if config.only_encodes else self.capacity.num_blocks
        self.loaded.model.allocate_kv(num_blocks, config.block_size, self._kv_dtype, layout)
        batch = InputBatch(
            config.max_num_seqs,
            self.loaded.max_model_len,
            config.block_size,
            layout,
            self._attachments,
            self.adapters.by_digest,
            max_steps_in_flight=max(1, config.pipeline_parallel_size - 1),
        )
        if self._is_serving:
            self.device.on_cache_allocated(self.loaded)
        self._runner = self._make_runner(batch)
        self.drafts.allocate_cache()
        if self.kv_transfer is None:
            self.kv_transfer = make_kv_transfer(self._config, self)
        if self.kv_transfer is not None:
            self.kv_transfer.register(self.loaded.model)
            if self._encoder is not None:
                self._encoder.ec_connector = self.kv_transfer.ec_connector

    def _make_runner(self, batch: InputBatch) -> Runner:
        capacity, model = self.capacity, self.loaded.model
        if self._config.only_encodes and isinstance(model, SupportsMultiModal):
            self._encoder = EncoderRunner(model, self.adapters.by_digest)
            return EncodingRunner(self._encoder, self._attachments)
        parts = RunnerInputs(
            self.loaded,
            batch,
            self._masks,
            capacity.layout,
            capacity.token_budget,
            self.drafts.attach(batch, capacity.num_blocks, capacity.layout),
            custom=self._logits_processors(),
        )
        runner = self.device.make_runner(parts)
        self._encoder = runner.encoder if isinstance(runner, ModelRunner) else None
        traced = self._config.traced_modules
        if not traced:
            return runner
        return TimedRunner(
            runner,
            model="model" in traced,
            worker="worker" in traced,
            synchronize=self.device.synchronize,
        )

    def _logits_processors(self) -> LogitsProcessors | None:
        """The engine's logits processors, one set per runner; None: there are none."""
        classes = self._logits_processor_classes()
        if not classes:
            return None
        device, pinned, config = self.kernels.device, self.device.pins_memory, self.vllm_config

        def make() -> list[LogitsProcessor]:
            return [cls(config, device, pinned) for cls in classes]

        return LogitsProcessors(make(), make)

    def on_serving(self) -> None:
        """Called after warm-up: use idle time to prepare for later steps."""
        self._is_serving = True
        self.device.on_cache_allocated(self.loaded)

    @property
    def supports_async_scheduling(self) -> bool:
        """Whether steps are planned ahead by default."""
        return self.device.overlaps

    @property
    def measures_prefill_pace(self) -> bool:
        """Whether prompts are timed at startup, so that their share of a step can be limited."""
        return self.device.times_prompts

    @property
    def kernels(self) -> KernelSet:
        """The device's kernels."""
        return self.device.kernels

    @property
    def vllm_config(self) -> VllmConfig:
        """Settings and facts by vLLM's names; available after `determine_available_blocks`."""
        return VllmConfig.of(
            self._config,
            self.loaded,
            self.device.torch_device,
            num_blocks=self.capacity.num_blocks,
            token_budget=self.capacity.token_budget,
            plans_ahead=self._config.uses_async_scheduling(self.supports_async_scheduling),
            rank=self.rank,
        )

    def read_numerics(self) -> Numerics | None:
        """Return what determines the bits of this worker's tokens; None if files can't be read any
        more.
        """
        return read_numerics(self._config, self.device.arithmetic, self.loaded.dtype)

    def attach(self, value: Any) -> int:
        """Store an object that plans refer to by the returned handle, until `detach`."""
        return self._attachments.add(value)

    def detach(self, handle: int) -> None:
        """Remove an attachment that no later plan refers to."""
        self._attachments.remove(handle)

    def send_bitmask(self, output: GrammarOutput) -> None:
        """Store the grammar bitmasks that a step waits for. May be called from any thread."""
        self._masks.publish(output)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the model raises; the batch stays usable."""
        self._use_threads()
        self._balance_experts(plan)
        self.device.note_step(plan)
        with self._kv_transfer_of(plan), self.forward_scope:
            return self._runner.execute(plan)

    def _kv_transfer_of(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Context in which a step is computed: its blocks are loaded before and saved after it."""
        if self.kv_transfer is None or not plan.kv_meta:
            return nullcontext()
        return self.kv_transfer.step(plan)

    def prepare(self, plan: StepPlan) -> Any:
        """Apply a plan's changes; returns inputs for `launch`, None without sequences.

        May be called while the previous step runs in another thread.
        """
        if plan.seq_ids:
            self.device.note_step(plan)
        else:
            with self._kv_transfer_of(plan):
                pass  # saves blocks of preempted sequences
        return self._runner.prepare(plan)

    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        """Start a prepared step after the previous one; always called in the same thread."""
        self._use_threads()
        if not plan.seq_ids:
            return self._runner.launch(plan, inputs)
        self._balance_experts(plan)
        with self._kv_transfer_of(plan), self.forward_scope:
            return self._runner.launch(plan, inputs)

    def _balance_experts(self, plan: StepPlan) -> None:
        if self._balancer is not None and plan.seq_ids:
            self._balancer.begin_step(plan.step)

    def reset(self) -> None:
        """Prepare for further steps after one has failed.

        Raises the device's error if the device is permanently lost.
        """
        self.device.on_step_failed()
        self._runner.reset()
        self._masks.clear()
        if self._balancer is not None:
            self._balancer.reset()
        if self._memory is not None and self.kv_transfer is not None:
            # Ranks, of other stages too, may have saved different blocks of the step.
            self.kv_transfer.connector.reset_cache()

    def _use_threads(self) -> None:
        """Apply the thread settings once, in the thread that runs steps."""
        if not self._threads_set:
            self._threads_set = True
            self.device.use_threads(self.loaded)

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is released, so that no step can be run."""
        return bool(self._sleeper.asleep)

    def check_sleep(self) -> None:
        """Raise `ConfigError` unless this model can sleep."""
        self._sleeper.check()

    def sleep(self, level: int) -> None:
        """Release memory; see `SleepController` for the levels."""
        self.check_sleep()
        # Graphs and their buffers are freed with the runner: they hold addresses of freed memory.
        self._runner = cast(Any, None)
        self.device.on_cache_released()
        self.drafts.sleep(level)
        self._sleeper.sleep(level)
        self.adapters.clear_host()

    def wake_up(self, tags: Collection[str]) -> None:
        """Restore `tags`. The KV cache is restored after the weights, in whatever order tags are
        woken.

        Raises `ModelLoadError` if the weights can't be read; then they stay asleep.
        """
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
        """Do nothing: a worker that answers is healthy."""

    def shutdown(self) -> None:
        """Stop the device's threads and release memory."""
        if self.kv_transfer is not None:
            self.kv_transfer.connector.shutdown()
        self.device.close()
        self._runner = cast(Any, None)
