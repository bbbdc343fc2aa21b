"""`EngineCore`: requests in, token deltas out. `step()` is the engine."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import (
    EngineOverloaded,
    EngineSleeping,
    InvalidRequest,
    QuireError,
)
from engine.contract.kv_transfer_config import EC_PRODUCER, ECTransferConfig, KVTransferConfig
from engine.contract.messages import (
    SLEEP_LEVELS,
    SLEEP_TAGS,
    EngineRequest,
    EngineStats,
    TokenDelta,
)
from engine.contract.replica_state import KVHandover
from engine.core.cached_prefixes import CachedPrefixes
from engine.core.input_processor import (
    InputProcessor,
    drop_kv_quota,
    resolve_scheduler_config,
    to_tensor,
)
from engine.core.kv_admission import KVAdmission
from engine.core.output_processor import OutputProcessor
from engine.core.request_admission import WAIT_S, RequestAdmission
from engine.core.request_log import log_request
from engine.core.stats import EngineStatsCollector, make_request_spans
from engine.core.steps_in_flight import StepInFlight, StepsInFlight
from engine.executor.multiproc_executor import make_executor
from engine.kv_transfer.base import KVConnectorBase, KVLoadError
from engine.kv_transfer.event_publisher import make_event_publisher
from engine.kv_transfer.storage_queue import READ_TIMEOUT_S
from engine.lora.adapter_cache import AdapterManager
from engine.lora.admission import AdapterAdmission
from engine.multimodal.audio import FEATURES
from engine.multimodal.encoder_text import TOKEN_IDS
from engine.multimodal.inputs import MediaTensors, decode_tensors
from engine.scheduler import Request, Scheduler, Sequence
from engine.scheduler.encoder_cache import EncoderItem, encoder_key
from engine.scheduler.plan import EncoderInput
from engine.scheduler.prefill_budget import PrefillLimits, PrefillPace
from engine.speculative.drafter import make_drafter
from engine.speculative.replay import make_replay_source
from engine.structured_output.manager import StructuredOutputManager
from engine.text.tokenizer import load_tokenizer
from engine.worker.compiled_step import MAX_LOGITS

log = logging.getLogger(__name__)

#: While nothing else is to be done, a KV connector is asked so often what has arrived.
_TRANSFER_POLL_S = 0.001


class EngineCore:
    """One replica's engine. Not thread-safe: all calls must come from one thread.

    Args:
        config: the replica's settings.
        progress: called with (done, total) while weights load.

    Attributes:
        facts: properties of the model; the executor holds the model itself.
        tokenizer: None with skip_tokenizer_init.
        capacity: limits of a step and of the KV cache.
        drafter: proposes drafts; None: no speculative decoding.
        cached_prefixes: prefixes of prompts that are cached here, for the heartbeat.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        if config.only_encodes:
            config = dataclasses.replace(config, speculative_config=None)
        self.config = config
        self._spans = make_request_spans(config)
        self.executor = executor = make_executor(config)
        self.facts = facts = executor.load(progress)
        self.capacity = capacity = executor.determine_available_blocks()
        executor.allocate_cache()
        self.scheduler = Scheduler(
            resolve_scheduler_config(config, facts, capacity),
            capacity.num_blocks,
            capacity.token_budget,
            PrefillLimits(prefill_tokens)
            if (prefill_tokens := config.prefill_tokens_beside_decodes)
            else None,
            capacity.layout,
            facts.max_model_len,
            mixes=capacity.mixes,
        )
        self.requests: dict[str, Request] = {}
        self.tokenizer = (
            None if config.skip_tokenizer_init else load_tokenizer(facts.tokenizer_folder)
        )
        self.structured = StructuredOutputManager(
            self.tokenizer, facts.vocab_size, facts.eos_token_ids
        )
        pipelined = config.pipeline_parallel_size > 1
        overlaps = config.uses_async_scheduling(executor.supports_async_scheduling)
        self.adapters = AdapterManager(executor.adapters)
        self._input_processor = InputProcessor(
            config, facts, self.scheduler.max_tokens_for, counts_placeholders=overlaps or pipelined
        )
        self._adapter_admission = AdapterAdmission(
            self.adapters, self._input_processor.check_vocabulary, facts.vocab_size
        )
        self._kv_admission = KVAdmission(self.scheduler.cached_prefix)
        self.cached_prefixes = CachedPrefixes(self.scheduler.kv)
        self._request_admission = RequestAdmission(
            self._adapter_admission,
            self.structured,
            self._kv_admission,
            # Each rank of an external launcher plans its own steps. All must make the same plan,
            # or they would generate different tokens.
            waits_for_all=config.needs_equal_requests,
        )
        self._counters = EngineStatsCollector(self.scheduler)
        self._outputs = OutputProcessor(
            self.scheduler,
            self.structured,
            self._counters,
            self.requests,
            facts.eos_token_ids,
            executor.detach,
            self._on_finished,
        )
        self.max_in_flight = 1 if overlaps else config.pipeline_parallel_size - 1
        #: Whether steps in flight hold different sequences.
        self._pipelined = pipelined
        self.drafter = make_drafter(
            config,
            facts,
            overlaps=overlaps,
            filter_drafts=self.structured.filter_drafts,
            host=executor.drafts,
            state_blocks=self.scheduler.kv.get_state_blocks,
        )
        self._replays = make_replay_source(
            config,
            facts,
            overlaps=overlaps,
            filter_drafts=self.structured.filter_drafts,
            max_logits=MAX_LOGITS,
        )
        self.scheduler.drafts.source = self.drafter or self._replays
        self._kv_settings = KVTransferConfig.from_mapping(config.kv_transfer_config or {})
        self.use_kv_connector(executor.kv_connector)
        #: Measures how long prompts take; None: prompts beside decodes aren't limited by time.
        self.prefill_pace: PrefillPace | None = None
        #: Called before each step with its sequences and those of all steps in flight.
        self.on_step_start: Callable[[list[Sequence]], None] | None = None
        self._steps_in_flight = StepsInFlight(
            executor, self.structured, overlaps=self.max_in_flight > 0, pipelined=pipelined
        )
        self._event_publisher = make_event_publisher(config)
        if self._event_publisher is not None:
            self.scheduler.kv.record_events()

    @property
    def only_saves_kv(self) -> bool:
        """Whether this replica computes prompts, or encodes, for other replicas."""
        if self.scheduler.kv_connector is None:
            return False
        return not self._kv_settings.loads or self._ec_role == EC_PRODUCER

    @property
    def kv_handover(self) -> KVHandover | None:
        """What other replicas must know to fetch blocks from here; part of the heartbeat."""
        connector = self.scheduler.kv_connector
        if connector is None or not (key_space := connector.key_space):
            return None
        return KVHandover(
            role=self._kv_settings.kv_role,
            key_space=key_space,
            step_tokens=self.capacity.token_budget,
            address=connector.address,
            ec_role=self._ec_role,
        )

    @property
    def _ec_role(self) -> str:
        values = self.config.ec_transfer_config
        return ECTransferConfig.from_mapping(values).ec_role if values else ""

    def use_kv_connector(self, connector: KVConnectorBase | None) -> None:
        """Save and load KV blocks with a connector; None: stop doing so."""
        self.scheduler.kv_connector = self._kv_admission.connector = connector
        self.cached_prefixes.connector = connector

    def add_request(
        self,
        message: EngineRequest,
        on_done: Callable[[], None] | None = None,
        *,
        prompt_embeds: Tensor | None = None,
        media: Mapping[bytes, MediaTensors] | None = None,
    ) -> Request:
        """Queue a request. Nothing is allocated before all checks have passed.

        `prompt_embeds`: float [num_prompt_tokens, hidden], replaces the embeddings of the prompt
        ids (like the message's own). `media`: encoder inputs of the message's pictures, by digest.

        Raises:
            InvalidRequest: a field is out of range for this model, or the id is in use.
            KVPoolTooSmall: it could never fit the pool.
            BudgetExhausted: its token cap leaves no token.
            EngineOverloaded: the waiting queue is full.
            EngineSleeping: the model sleeps.
        """
        if self.executor.is_sleeping:
            raise EngineSleeping("The model sleeps until an operator wakes it up.")
        if message.request_id in self.requests:
            raise InvalidRequest(
                f"request_id {message.request_id!r} is in use.", param="request_id"
            )
        message = drop_kv_quota(message, self.facts, self.config)
        self._input_processor.check(message, self._adapter_admission.vocab_size(message))
        if message.prompt_embeds is not None:
            prompt_embeds = to_tensor(message.prompt_embeds)
            message = msgspec.structs.replace(message, prompt_embeds=None)
        if message.media_data:
            media = {digest: decode_tensors(data) for digest, data in message.media_data.items()}
            message = msgspec.structs.replace(message, media_data={})
        self._adapter_admission.check(message)
        if prompt_embeds is not None:
            self._input_processor.check_prompt_embeds(message, prompt_embeds)
        self._input_processor.check_media(
            message, media or {}, self.scheduler.encoder_cache.capacity
        )
        waiting = self.scheduler.num_waiting + self._request_admission.num_waiting
        if waiting + message.sampling.num_running > self.config.max_waiting:
            raise EngineOverloaded(f"{waiting} requests wait already.")
        if self.config.enable_log_requests:  # before it is queued: decoding the prompt may fail
            log_request(message, self.tokenizer if prompt_embeds is None else None)
        request = self._input_processor.make_request(message, on_done, prompt_embeds)
        for sequence in request.sequences:
            if sequence.request_id in self.scheduler.kv_transfers:
                raise InvalidRequest(
                    f"The KV connector still holds blocks of a request {sequence.request_id!r}.",
                    param="request_id",
                )
        self._attach(request, prompt_embeds, media or {})
        self.cached_prefixes.record(message.prefix_key, request.sequences[0])
        if self._admit(request):
            self._queue(request)
        self.requests[message.request_id] = request
        return request

    def follow_prefill(self, message: EngineRequest) -> None:
        """Read the blocks of a request that comes later while another replica computes them."""
        if self.executor.is_sleeping:
            return
        try:
            self._input_processor.check(message, self._adapter_admission.vocab_size(message))
        except QuireError:
            return  # it is refused once it comes
        self._kv_admission.follow_prefill(self._input_processor.make_request(message, None))

    def _on_finished(self, request: Request) -> None:
        """Release what a request holds after its last output has ended."""
        self.adapters.release(request)
        if self._replays is not None:
            self._replays.keep(request)
        if self._spans is not None:
            self._spans.record_finished(request)

    def _admit(self, request: Request) -> bool:
        """Whether the request can be queued now, without waiting for any prerequisite."""
        try:
            return self._request_admission.admit(request)
        except QuireError:
            self.adapters.release(request)
            for handle in request.attachment_handles:
                self.executor.detach(handle)
            raise

    def _attach(
        self,
        request: Request,
        prompt_embeds: Tensor | None,
        media: Mapping[bytes, MediaTensors],
    ) -> None:
        """Attach to the executor what plans refer to by handle."""
        attach = self.executor.attach
        if prompt_embeds is not None:
            handle = attach(prompt_embeds.float().cpu().contiguous())
            request.encoder_inputs = [EncoderInput(0, len(prompt_embeds), handle)]
        handles = {digest: attach(tensors) for digest, tensors in media.items()}
        items = [
            EncoderItem(
                item,
                encoder_key(request.message, item),
                handles[item.digest],
                bidirectional=self.facts.bidirectional_span > 0,
                tenant=request.message.tenant,
                cache_namespace=request.message.cache_namespace,
                num_states=self._num_states(media[item.digest]),
            )
            for item in request.message.media
        ]
        if self.facts.encoder_length or self.facts.max_encoder_tokens:
            [request.encoder_input] = items
        else:
            request.media = items
        if (functions := request.message.sampling.logits_processors) is not None:
            request.logits_processors = attach(functions)

    def _num_states(self, tensors: MediaTensors) -> int:
        """Number of encoder states that tokens attend to; 0: the model has no cross attention."""
        if self.facts.max_encoder_tokens:
            return len(tensors[TOKEN_IDS])
        return tensors[FEATURES].shape[1] // 2 if self.facts.encoder_length else 0

    def _queue(self, request: Request) -> None:
        for sequence in request.sequences:
            if request.is_beam_search and sequence.index > 0:
                self.scheduler.add_parked_beam(sequence)
            elif not sequence.finished:
                self.scheduler.add(sequence)

    def abort(
        self, request_id: str, index: int | None = None, reason: str = "abort"
    ) -> list[TokenDelta]:
        """Stop a request (or one of its outputs) now; its blocks are free when this returns.

        Returns the final deltas. An unknown or finished id is no error: the request may have
        finished while the abort was on its way.
        """
        request = self.requests.get(request_id)
        if request is None:
            if self.scheduler.kv_connector is not None:
                self.scheduler.kv_connector.stop_following(request_id)
            return []
        deltas: list[TokenDelta] = []
        for sequence in request.sequences:
            # A beam search has no outputs before its end, so it can only be stopped as a whole.
            matches = index is None or (index == sequence.index and not request.is_beam_search)
            if matches and not sequence.finished:
                deltas += self._outputs.finish_early(sequence, reason)
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do. While the model sleeps, requests wait."""
        if self.executor.is_sleeping:
            return False
        return bool(
            self.scheduler.has_work
            or self.scheduler.kv_transfers
            or self._request_admission.has_pending
            or self._steps_in_flight
            or self.is_aligning
        )

    @property
    def is_aligning(self) -> bool:
        """Whether word timestamps of speech, computed after the text, are still missing."""
        return self._outputs.aligner.has_pending

    def step(self) -> list[TokenDelta]:
        """Schedule and execute a step; return the new tokens of all sequences that got one.

        With async scheduling the step is only started, and the previous one is processed: tokens
        are returned one call later.
        """
        started = time.perf_counter()
        deltas = self._admit_ready() if self._request_admission.has_pending else []
        if self.scheduler.kv_connector is not None:
            deltas += self._poll_kv_transfers(self.scheduler.kv_connector)
        if self.is_aligning:
            deltas += self._outputs.aligner.pop_ready(WAIT_S if self._is_idle() else 0.0)
        # An isolated sequence's step overlaps no other; after an interrupt one more may be in
        # flight.
        overlaps = self.max_in_flight and not self.scheduler.has_isolated_step
        deltas += self._process_steps(self.max_in_flight if overlaps else 0)
        plan, scheduled = self.scheduler.schedule()
        self._publish_events()
        if self.on_step_start is not None:
            self.on_step_start([*self.sequences_in_flight, *scheduled])
        if scheduled:
            self._steps_in_flight.start(plan, scheduled)
        else:
            # This plan saves blocks that the steps in flight compute, unless one of them fails.
            if plan.kv_meta and self._steps_in_flight.wait_until_failed():
                plan.kv_meta = b""
            self.executor.apply_plan(plan)
            if not self._steps_in_flight:
                self.scheduler.park_idle_beam()
        for sequence, error in self.scheduler.pop_rejected():
            deltas += self._outputs.reject(sequence, error)
        in_flight = len(self._steps_in_flight)
        deltas += self._process_steps(self.max_in_flight if scheduled else max(0, in_flight - 1))
        self._counters.record_step(started, plan if scheduled else None)
        if scheduled and not self.max_in_flight:
            seconds = time.perf_counter() - started
            if self.prefill_pace is not None:
                load = self.scheduler.prompt_load
                num_vectors = self.scheduler.encoder_cache.num_step_vectors
                self.prefill_pace.update(load, plan.num_decodes, seconds, num_vectors)
            if self.drafter is not None:
                self.drafter.note_step(plan, seconds)
        return deltas

    @property
    def sequences_in_flight(self) -> list[Sequence]:
        """Sequences of the steps whose results haven't been processed."""
        return self._steps_in_flight.sequences

    def _process_steps(self, max_in_flight: int) -> list[TokenDelta]:
        """Process the oldest steps until no more than `max_in_flight` are in flight."""
        deltas: list[TokenDelta] = []
        while len(self._steps_in_flight) > max_in_flight:
            step = self._steps_in_flight.oldest
            try:
                result, bitmask = self._steps_in_flight.pop_oldest()
            except Exception as error:
                return deltas + self._recover(step, error)
            if self.drafter is not None:
                self.drafter.record_tracking(result.tracking_seconds)
            self._counters.record_model_time(step.scheduled, result)
            deltas += self._outputs.process_outputs(step.plan, step.scheduled, result, bitmask)
            self._steps_in_flight.start_late_bitmasks()
        return deltas

    def _poll_kv_transfers(self, connector: KVConnectorBase) -> list[TokenDelta]:
        """Queue the sequences whose blocks the connector has loaded while steps ran."""
        deltas: list[TokenDelta] = []
        for sequence in self.scheduler.kv_transfers.poll(connector):
            if self._kv_settings.kv_load_failure_policy == "fail":
                deltas += self._outputs.finish_with_fault(sequence, "KV blocks weren't loaded.")
        if self.scheduler.kv_transfers and self._is_idle():
            time.sleep(_TRANSFER_POLL_S)
        return deltas

    def _admit_ready(self) -> list[TokenDelta]:
        """Queue the requests whose prerequisites are ready; reject those that can't be served."""
        deltas: list[TokenDelta] = []
        for request, error in self._request_admission.poll_ready(self._is_idle):
            if error is None:
                self._queue(request)
                continue
            for sequence in request.sequences:
                if not sequence.finished:  # rejecting one beam ended the others
                    deltas += self._outputs.reject(sequence, error)
        return deltas

    def _is_idle(self) -> bool:
        return not (self.scheduler.has_work or self._steps_in_flight)

    def _recover(self, step: StepInFlight, error: Exception) -> list[TokenDelta]:
        """Handle a failed step: fail its only sequence, or run each of its sequences alone next."""
        log.error(
            "Step %d failed with %d sequences", step.plan.step, len(step.scheduled), exc_info=error
        )
        # Wait for all of them: they must not run concurrently with the next step.
        failed = self._steps_in_flight.pop_all()
        self.executor.resume()
        self.scheduler.roll_back(
            *((failed_step.plan, failed_step.scheduled) for failed_step in failed)
        )
        deltas = self._fail_loading(step, error) if isinstance(error, KVLoadError) else []
        alive = [sequence for sequence in step.scheduled if not sequence.finished]
        if self._pipelined and len(failed) > 1:
            return deltas  # it isn't known which of the steps failed: isolate all of them
        # A sequence that loaded KV blocks is retried without them, and fails only if that fails
        # too.
        if len(step.scheduled) > 1 or not alive or alive[0].num_external_tokens:
            return deltas
        return deltas + self._outputs.finish_with_fault(
            alive[0], f"{type(error).__name__}: {error}"
        )

    def _fail_loading(self, step: StepInFlight, error: KVLoadError) -> list[TokenDelta]:
        """End the sequences that loaded blocks in a failed step, if the failure policy is
        "fail".
        """
        if self._kv_settings.kv_load_failure_policy != "fail":
            return []
        started = {new.seq_id for new in step.plan.new}
        deltas: list[TokenDelta] = []
        for sequence in step.scheduled:
            loads = sequence.seq_id in started and sequence.num_external_tokens
            if loads and not sequence.finished:
                deltas += self._outputs.finish_with_fault(sequence, f"KV blocks: {error}")
        return deltas

    def check_health(self) -> None:
        """Raise `EngineFault` if no further step can be run."""
        self.executor.check_health()

    def shutdown(self) -> None:
        """Stop the executor and close everything; the engine can't be used afterwards."""
        self.adapters.close()
        self._outputs.aligner.close()
        if self._event_publisher is not None:
            self._event_publisher.close()
        self.executor.shutdown()
        if self._spans is not None:
            self._spans.close()

    def preempt_all(self) -> list[TokenDelta]:
        """Preempt all running requests; they resume with the next step. Returns the deltas of the
        steps in flight.
        """
        deltas = self._process_steps(0)
        self.scheduler.preempt_all()
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; False while any request holds blocks."""
        if self.drafter is not None:
            self.drafter.reset()
        if self._replays is not None:
            self._replays.clear()
        if self.scheduler.kv_connector is not None:
            self.scheduler.kv_connector.reset_cache()
        is_reset = self.scheduler.kv.reset_prefix_cache()
        self._publish_events()
        return is_reset

    def reset_encoder_cache(self) -> bool:
        """Drop unused encoder outputs; False while a request needs some of them."""
        if self.scheduler.kv_connector is not None:
            self.scheduler.kv_connector.reset_encoder_cache()
        return self.scheduler.encoder_cache.drop_unused()

    def _publish_events(self) -> None:
        events = self.scheduler.kv.events
        if self._event_publisher is not None and events is not None:
            self._event_publisher.publish(events.pop_events())

    @property
    def is_sleeping(self) -> bool:
        """Whether some of the memory is released."""
        return self.executor.is_sleeping

    def check_sleep(self, level: int) -> None:
        """Raise if `sleep` isn't possible.

        Raises:
            InvalidRequest: there's no such level, or `enable_sleep_mode` is off.
            EngineOverloaded: the KV connector still loads or sends blocks.
            ConfigError: the model can't sleep.
        """
        if isinstance(level, bool) or level not in SLEEP_LEVELS:
            raise InvalidRequest(f"level must be 1 or 2, got {level!r}.", param="level")
        if not self.config.enable_sleep_mode:
            raise InvalidRequest("Sleeping needs enable_sleep_mode.", param="enable_sleep_mode")
        if num_transfers := len(self.scheduler.kv_transfers):
            raise EngineOverloaded(
                f"The KV connector still loads or sends the blocks of {num_transfers} requests."
            )
        self.executor.check_sleep()

    def sleep(self, level: int = 1) -> list[TokenDelta]:
        """Release memory until `wake_up`: at level 1 the KV cache (on a GPU the weights move to
        host memory, too), at level 2 also the weights.

        Running requests are preempted and resume after `wake_up`. The prefix cache is emptied.
        Returns the deltas of the steps in flight.

        Raises as `check_sleep` does.
        """
        self.check_sleep(level)
        deltas = self.preempt_all() + self._outputs.aligner.pop_ready(None)
        connector, deadline = self.scheduler.kv_connector, time.monotonic() + READ_TIMEOUT_S
        while connector and self.scheduler.kv_transfers and time.monotonic() < deadline:
            # Blocks of requests that the last step has ended are being sent.
            deltas += self._poll_kv_transfers(connector)
            time.sleep(_TRANSFER_POLL_S)
        if not self.executor.is_sleeping:  # a deeper sleep may follow a lighter one
            # Save blocks while they still exist.
            self.executor.apply_plan(self.scheduler.plan_removals())
        self.scheduler.encoder_cache.reset()
        if not self.scheduler.kv.reset_prefix_cache():
            raise RuntimeError("Blocks are in use though nothing runs.")
        self._publish_events()
        if level == 2:
            self.adapters.drop_idle()
            if self.scheduler.kv_connector is not None:
                self.scheduler.kv_connector.reset_cache()  # the weights may differ after waking up
        self.executor.sleep(level)
        if self.drafter is not None:
            self.drafter.reset(worker_too=True)
        return deltas

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Allocate memory again for the given `SLEEP_TAGS`; None: all.

        Raises:
            InvalidRequest: there's no such tag.
            ModelLoadError: the weights can't be read any more; they stay asleep.
        """
        for tag in tags or ():
            if tag not in SLEEP_TAGS:
                raise InvalidRequest(
                    f"tags must be of {', '.join(SLEEP_TAGS)}; got {tag!r}.", param="tags"
                )
        if self.executor.is_sleeping:
            self.executor.wake_up(tags or SLEEP_TAGS)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the pool's accounting is consistent."""
        self.scheduler.check_integrity()
        if self.drafter is not None:
            self.drafter.check_integrity()

    def reset_stats(self) -> None:
        """Reset the totals."""
        self._counters.reset()

    @property
    def stats(self) -> EngineStats:
        """Totals since the start; `snapshot` also brings the load up to date."""
        return self._counters.stats

    def snapshot(self) -> EngineStats:
        """Current load and totals."""
        stats = self._counters.snapshot(self._request_admission.num_waiting)
        self.adapters.fill_stats(stats)
        stats.collective_seconds_total = self.executor.collective_s
        if self.scheduler.kv_connector is not None:
            stats.kv_tier_failures_total = {}
            self.scheduler.kv_connector.fill_stats(stats)
            failures = Counter(self.scheduler.kv_transfers.num_failures)
            failures["late"] += self._kv_admission.num_late
            stats.kv_tier_failures_total = dict(+failures + Counter(stats.kv_tier_failures_total))
        return stats
