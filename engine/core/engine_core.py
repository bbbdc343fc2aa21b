"""`EngineCore`: requests in, token deltas out. `step()` is the engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import msgspec
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineOverloaded, EngineSleeping, InvalidRequest, QuireError
from engine.contract.messages import (
    SLEEP_LEVELS,
    SLEEP_TAGS,
    EngineRequest,
    EngineStats,
    FlightRecord,
    TokenDelta,
)
from engine.core.input_processor import (
    InputProcessor,
    drop_kv_quota,
    resolve_scheduler_config,
    to_tensor,
)
from engine.core.output_processor import Exits, OutputProcessor
from engine.core.request_admission import RequestAdmission
from engine.core.stats import EngineStatsCollector, make_request_spans
from engine.executor.abstract import StepFuture
from engine.executor.uniproc_executor import make_executor
from engine.lora.adapter_cache import AdapterManager
from engine.lora.admission import AdapterAdmission
from engine.scheduler import GrammarOutput, Request, Scheduler, Sequence, StepPlan, StepResult
from engine.scheduler.plan import EncoderInput
from engine.scheduler.prefill_budget import PrefillLimits, PrefillPace
from engine.speculative.drafter import Drafter, make_drafter
from engine.structured_output.manager import StructuredOutputManager

# -- `SpecDecodeStats`: what the core does about drafts, from step to step.


class SpecDecodeStats:
    """Has the drafter hear what it must, and counts what held. Without one nothing happens."""

    def __init__(
        self, drafter: Drafter | None, scheduler: Scheduler, counters: EngineStatsCollector
    ) -> None:
        """`drafter`: who gives the scheduler's rows drafts; None: nobody does."""
        self._drafter, self._scheduler, self._counters = drafter, scheduler, counters
        scheduler.drafter = drafter
        counters.timeline_observers.append(_observe)

    def settle(self, plan: StepPlan, scheduled: list[Sequence], result: StepResult) -> None:
        """A step was run: what didn't hold is taken back, and counted."""
        if self._drafter is not None:
            self._drafter.note_following(result.tracking_seconds)
        if plan.drafts:
            self._scheduler.process_drafts(plan, scheduled, result.token_ids)
            self._count(plan, result)

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step's drafts, and those that held by their place."""
        stats = self._counters.stats
        for seq_id, token_ids in zip(plan.seq_ids, result.token_ids, strict=True):
            drafts = plan.drafts.get(seq_id)
            if drafts is None:
                continue
            accepted = max(0, len(token_ids) - 1)
            stats.spec_decode_num_drafts_total += 1
            stats.spec_decode_num_draft_tokens_total += len(drafts)
            stats.spec_decode_num_accepted_tokens_total += accepted
            held = stats.spec_decode_num_accepted_tokens_per_pos_total
            held += [0] * (len(drafts) - len(held))
            for place in range(accepted):
                held[place] += 1

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """What a step took, its plan and its result included."""
        if self._drafter is not None:
            self._drafter.note_step(plan, seconds)

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget what a draft model has cached; `worker_too`: its memory was given back."""
        if self._drafter is not None:
            self._drafter.reset(worker_too=worker_too)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless a draft model's pool is in order."""
        if self._drafter is not None:
            self._drafter.check_integrity()


def _observe(flight: FlightRecord, observe: Callable[[str, float], None]) -> None:
    """What an output that ended says of its drafts."""
    if flight.num_drafts:
        observe("request_spec_decode_accepted_length", flight.mean_accepted_length)


log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepInFlight:
    """A step that was begun: its plan, the plan's sequences in order, and what comes of it.

    Attributes:
        masks: its grammars' masks, once they were begun.
    """

    plan: StepPlan
    scheduled: list[Sequence]
    result: StepFuture
    masks: Future[GrammarOutput] | None = None


class EngineCore:
    """One replica's engine. Not thread-safe: one thread calls everything.

    Args:
        config: the replica's settings.
        progress: called with (done, total) while weights load.

    Attributes:
        facts: what is known of the model; the model itself is the executor's.
        capacity: what a step and the KV cache hold.
        drafter: who gives drafts, if anybody does.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.config = config
        self._spans = make_request_spans(config)
        self.executor = executor = make_executor(config)
        self.facts = facts = executor.load(progress)
        self.capacity = capacity = executor.determine_available_blocks()
        executor.allocate_cache()
        self.scheduler = Scheduler(
            resolve_scheduler_config(
                config, facts, capacity.token_budget, capacity.max_stateful_sequences
            ),
            capacity.num_blocks,
            capacity.token_budget,
            PrefillLimits(told) if (told := config.prefill_tokens_beside_decodes) else None,
            capacity.layout,
            facts.max_model_len,
        )
        self.requests: dict[str, Request] = {}
        self.structured = StructuredOutputManager(
            facts.tokenizer, facts.vocab_size, facts.eos_token_ids
        )
        overlaps = config.uses_async_scheduling(executor.supports_async_scheduling)
        self.adapters = AdapterManager.of(executor.adapters)
        self._input_processor = InputProcessor(
            config, facts, self.scheduler.max_tokens_for, looks_ahead=overlaps
        )
        self._admission = AdapterAdmission(
            self.adapters, self._input_processor.check_vocabulary, facts.vocab_size
        )
        self._entrance = RequestAdmission(self._admission, self.structured)
        self._counters = EngineStatsCollector(self.scheduler)
        self._exits = Exits(
            self.scheduler,
            self.structured,
            self._counters,
            self.requests,
            facts.eos_token_ids,
            executor.detach,
            self._ended,
        )
        self._harvest = OutputProcessor(
            self.scheduler, self.structured, self._counters, self._exits
        )
        self.max_in_flight = 1 if overlaps else 0
        self.drafter = make_drafter(
            config,
            facts,
            overlaps=overlaps,
            possible=self.structured.filter_drafts,
            host=executor.drafts,
        )
        self._drafts = SpecDecodeStats(self.drafter, self.scheduler, self._counters)
        #: Follows how long prompts take; set where that bounds them beside decodes.
        self.prefill_pace: PrefillPace | None = None
        #: Hears before each step which sequences those under way hold then.
        self.on_step_start: Callable[[list[Sequence]], None] | None = None
        self._steps_in_flight: deque[StepInFlight] = deque()

    # -- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        message: EngineRequest,
        on_done: Callable[[], None] | None = None,
        *,
        prompt_embeds: Tensor | None = None,
    ) -> Request:
        """Queue a request. Nothing is allocated before all checks have passed.

        `prompt_embeds`: float [num_prompt_tokens, hidden] in the place of the prompt ids' own, as
        the message's are.

        Raises:
            InvalidRequest: a field is out of range for this model, or the id is in use.
            KVPoolTooSmall: it could never fit the pool.
            BudgetExhausted: its token cap leaves no token.
            EngineOverloaded: the waiting queue is full.
            EngineSleeping: the model's memory is given back.
        """
        if self.executor.is_sleeping:
            raise EngineSleeping("The model sleeps until an operator wakes it up.")
        if message.request_id in self.requests:
            raise InvalidRequest(
                f"request_id {message.request_id!r} is in use.", param="request_id"
            )
        message = drop_kv_quota(message, self.facts)
        self._input_processor.check(message, self._admission.vocab_size(message))
        if message.prompt_embeds is not None:
            prompt_embeds = to_tensor(message.prompt_embeds)
            message = msgspec.structs.replace(message, prompt_embeds=None)
        self._admission.check(message)
        if prompt_embeds is not None:
            self._input_processor.check_prompt_embeds(message, prompt_embeds)
        waiting = len(self.scheduler.waiting) + self._entrance.num_waiting
        if waiting + message.sampling.num_running > self.config.max_waiting:
            raise EngineOverloaded(f"{waiting} requests wait already.")
        request = self._input_processor.make_request(message, on_done, prompt_embeds)
        ready = self._admit(request)
        self._attach(request, prompt_embeds)
        if ready:
            self._queue(request)
        self.requests[message.request_id] = request
        return request

    def _ended(self, request: Request) -> None:
        """A request's last output has ended."""
        self.adapters.release(request)
        if self._spans is not None:
            self._spans.record_finished(request)

    def _admit(self, request: Request) -> bool:
        """Whether nothing has to come first."""
        try:
            return self._entrance.admit(request)
        except QuireError:
            self.adapters.release(request)
            raise

    def _attach(self, request: Request, prompt_embeds: Tensor | None) -> None:
        """Hand to the executor what plans will name by handle."""
        attach = self.executor.attach
        if prompt_embeds is not None:
            handle = attach(prompt_embeds.float().cpu().contiguous())
            request.encoder_inputs = [EncoderInput(0, len(prompt_embeds), handle)]
        if (functions := request.message.sampling.logits_processors) is not None:
            request.logits_processors = attach(functions)

    def _queue(self, request: Request) -> None:
        """Hand a request's sequences to the scheduler."""
        for sequence in request.sequences:
            if request.is_beam_search and sequence.index > 0:
                self.scheduler.add_parked_beam(sequence)
            elif not sequence.finished:
                self.scheduler.add(sequence)

    def abort(
        self, request_id: str, index: int | None = None, reason: str = "abort"
    ) -> list[TokenDelta]:
        """Stop a request (or one of its outputs) now; its blocks are free when this returns.

        Returns the final deltas. An unknown or finished id is no error: the end and the abort may
        have crossed on their way.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        deltas: list[TokenDelta] = []
        for sequence in request.sequences:
            # Of a search there is no output before its end, so none to stop alone.
            wanted = index is None or (index == sequence.index and not request.is_beam_search)
            if wanted and not sequence.finished:
                deltas += self._exits.finish_early(sequence, reason)
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. Requests of a model that sleeps wait."""
        if self.executor.is_sleeping:
            return False
        return bool(self.scheduler.has_work or self._entrance.has_pending or self._steps_in_flight)

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Schedule, execute, update: new tokens of all sequences that got one.

        With async scheduling a step is only begun here, and the one before it updated: the tokens
        come one call later.
        """
        started = time.perf_counter()
        deltas = self._admit_ready() if self._entrance.has_pending else []
        deltas += self._process_steps(self._max_concurrent_steps)  # an interrupt may leave one more
        begun = self._start_step()
        for ended in self.scheduler.pop_rejected():
            deltas += self._exits.reject(*ended)
        if begun is not None:
            self._steps_in_flight.append(begun)
        deltas += self._process_steps(self.max_in_flight if begun else 0)
        self._counters.note_step(started, None if begun is None else begun.plan)
        if begun is not None and not self.max_in_flight:
            seconds = time.perf_counter() - started
            if self.prefill_pace is not None:
                load = self.scheduler.prompt_load
                self.prefill_pace.update(load, begun.plan.num_decodes, seconds)
            self._drafts.note_step(begun.plan, seconds)
        return deltas

    @property
    def sequences_in_flight(self) -> list[Sequence]:
        """Sequences of the steps that were begun and aren't updated yet."""
        return [each for step in self._steps_in_flight for each in step.scheduled]

    @property
    def _max_concurrent_steps(self) -> int:
        """Steps that may be in flight while the next one is begun."""
        if self.max_in_flight and self.scheduler.has_isolated_step:
            return 0
        return self.max_in_flight

    def _start_step(self) -> StepInFlight | None:
        """Schedule a step and have it run; None when there is nothing to compute now."""
        plan, scheduled = self.scheduler.schedule()
        if self.on_step_start is not None:
            self.on_step_start(
                [*self.sequences_in_flight, *scheduled] if self._steps_in_flight else scheduled
            )
        if not scheduled:
            self.executor.apply_plan(plan)
            if not self._steps_in_flight:
                self.scheduler.park_idle_beam()
            return None
        masks = None
        if self.structured.needs_bitmask:
            if self._steps_in_flight:  # they can be begun once the step before has been followed
                plan.awaits_bitmask = True
            else:
                masks = self._begin_masks(plan)
                plan.awaits_bitmask = masks is not None
        return StepInFlight(plan, scheduled, self._execute(plan), masks)

    def _begin_masks(self, plan: StepPlan) -> Future[GrammarOutput] | None:
        """Start on the masks of the step that was scheduled last; they go to the executor."""
        masks = self.structured.start_bitmask(plan)
        if masks is not None:
            masks.add_done_callback(partial(_send_bitmask, self.executor.send_bitmask, plan.step))
        return masks

    def _execute(self, plan: StepPlan) -> StepFuture:
        """The step's result: to come, or there already without async scheduling."""
        if self.max_in_flight:
            return self.executor.execute_async(plan)
        result: Future[StepResult] = Future()
        try:
            result.set_result(self.executor.execute(plan))
        except Exception as error:  # `_recover` takes the step back
            result.set_exception(error)
        return result

    def _process_steps(self, count: int) -> list[TokenDelta]:
        """Update the oldest steps until so many are in flight."""
        deltas: list[TokenDelta] = []
        while len(self._steps_in_flight) > count:
            deltas += self._process_oldest()
        return deltas

    def _process_oldest(self) -> list[TokenDelta]:
        """Wait for the oldest step's result and update; then the next one's masks can be made."""
        step = self._steps_in_flight[0]
        try:
            result = step.result.result()
        except Exception as error:
            return self._recover(step, error)
        # Not before: an interrupt while it waits must leave the step for the next call.
        self._steps_in_flight.popleft()
        masks = None if step.masks is None else step.masks.result()
        self._drafts.settle(step.plan, step.scheduled, result)
        deltas = self._harvest.process_outputs(step.plan, step.scheduled, result, masks)
        for later in self._steps_in_flight:
            if later.plan.awaits_bitmask:
                later.masks = self._begin_masks(later.plan)
                if later.masks is None:
                    self.executor.send_bitmask(GrammarOutput(later.plan.step))
        return deltas

    def _admit_ready(self) -> list[TokenDelta]:
        """Queue the requests that wait for nothing any more; answer those that can't be served."""
        deltas: list[TokenDelta] = []
        for request, error in self._entrance.poll_ready(self._is_idle):
            if error is None:
                self._queue(request)
                continue
            for sequence in request.sequences:
                if not sequence.finished:  # a search's beams end together
                    deltas += self._exits.reject(sequence, error)
        return deltas

    def _is_idle(self) -> bool:
        """Whether there is nothing to run."""
        return not (self.scheduler.has_work or self._steps_in_flight)

    def _recover(self, step: StepInFlight, error: Exception) -> list[TokenDelta]:
        """A step failed: blame its only sequence, or let each of them run alone from here on."""
        log.error(
            "Step %d failed with %d sequences", step.plan.step, len(step.scheduled), exc_info=error
        )
        failed = list(self._steps_in_flight)
        self._steps_in_flight.clear()
        for each in failed:
            # Nothing of them may still be at work on the next step.
            each.result.exception()
            if each.masks is not None:
                each.masks.exception()
        self.executor.resume()
        self.scheduler.roll_back(*((each.plan, each.scheduled) for each in failed))
        alive = [sequence for sequence in step.scheduled if not sequence.finished]
        if len(step.scheduled) > 1 or not alive:
            return []
        return self._exits.finish_with_fault(alive[0], f"{type(error).__name__}: {error}")

    # -- for operators ------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise `EngineFault` when no step can ever be run again."""
        self.executor.check_health()

    def shutdown(self) -> None:
        """End what runs steps; the engine is of no use afterwards."""
        self.adapters.close()
        self.executor.shutdown()
        if self._spans is not None:
            self._spans.close()

    def preempt_all(self) -> list[TokenDelta]:
        """Have all that runs give its blocks back and wait: it goes on with the next step, as after
        a preemption. Returns what the steps under way brought.
        """
        deltas = self._process_steps(0)
        self.scheduler.preempt_all()
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while any request holds blocks."""
        self._drafts.reset()
        return self.scheduler.kv.pool.reset_prefix_cache()

    @property
    def is_sleeping(self) -> bool:
        """Whether some of the memory is given back."""
        return self.executor.is_sleeping

    def check_sleep(self, level: int) -> None:
        """Raise for what `sleep` would refuse.

        Raises:
            InvalidRequest: there's no such level, or `enable_sleep_mode` is off.
            ConfigError: the model can't sleep.
        """
        if isinstance(level, bool) or level not in SLEEP_LEVELS:
            raise InvalidRequest(f"level must be 1 or 2, got {level!r}.", param="level")
        if not self.config.enable_sleep_mode:
            raise InvalidRequest("Sleeping needs enable_sleep_mode.", param="enable_sleep_mode")
        self.executor.check_sleep()

    def sleep(self, level: int = 1) -> list[TokenDelta]:
        """Give memory back until `wake_up`: at level 1 the KV cache (on a GPU the weights too, to
        host memory), at level 2 the weights as well.

        Requests that run go on when it wakes up, as after a preemption. The prefix cache is empty
        then. Returns what the steps under way brought.

        Raises as `check_sleep` does.
        """
        self.check_sleep(level)
        deltas = self.preempt_all()
        if not self.scheduler.kv.pool.reset_prefix_cache():
            raise RuntimeError("Blocks are in use though nothing runs.")
        if level == 2:
            self.adapters.drop_idle()
        self.executor.sleep(level)
        self._drafts.reset(worker_too=True)
        return deltas

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take memory again, of `SLEEP_TAGS` those named; None: all.

        Raises:
            InvalidRequest: there's no such tag.
            ModelLoadError: the weights can't be read any more; they sleep on.
        """
        for tag in tags or ():
            if tag not in SLEEP_TAGS:
                raise InvalidRequest(
                    f"tags must be of {', '.join(SLEEP_TAGS)}; got {tag!r}.", param="tags"
                )
        if self.executor.is_sleeping:
            self.executor.wake_up(tags or SLEEP_TAGS)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the pool's books balance."""
        self.scheduler.check_integrity()
        self._drafts.check_integrity()

    def reset_stats(self) -> None:
        """Start the totals anew."""
        self._counters.reset()

    @property
    def stats(self) -> EngineStats:
        """Totals since the start; `snapshot` also brings the load up to date."""
        return self._counters.stats

    def snapshot(self) -> EngineStats:
        """Load and totals as of now."""
        stats = self._counters.snapshot(self._entrance.num_waiting)
        self.adapters.fill_stats(stats)
        return stats


def _send_bitmask(
    give: Callable[[GrammarOutput], None], step: int, masks: Future[GrammarOutput]
) -> None:
    """Give a step its masks, or the reason why there are none."""
    error = masks.exception()
    give(masks.result() if error is None else GrammarOutput(step, failure=f"Masks: {error!r}"))
