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
    scheduler_config,
    tensor_of,
    without_kv_quota,
)
from engine.core.output_processor import Exits, Harvest
from engine.core.request_admission import Entrance
from engine.core.stats import EngineCounters, spans_of
from engine.executor.abstract import Outcome
from engine.executor.uniproc_executor import make_executor
from engine.lora.adapter_cache import AdapterPool
from engine.lora.admission import AdapterAdmission
from engine.scheduler import GrammarOutput, Request, Scheduler, Sequence, StepPlan, StepResult
from engine.scheduler.plan import EncoderInput
from engine.scheduler.prefill_budget import PrefillPace, PrefillShare
from engine.speculative.drafter import Drafter, make_drafter
from engine.structured_output.manager import StructuredOutputManager

# -- `CoreDrafts`: what the core does about drafts, from step to step.


class CoreDrafts:
    """Has the drafter hear what it must, and counts what held. Without one nothing happens."""

    def __init__(
        self, drafter: Drafter | None, scheduler: Scheduler, counters: EngineCounters
    ) -> None:
        """`drafter`: who gives the scheduler's rows drafts; None: nobody does."""
        self._drafter, self._rows, self._counters = drafter, scheduler.drafts, counters
        scheduler.drafts.source = drafter
        counters.of_flights.append(_observe)

    def settle(self, plan: StepPlan, scheduled: list[Sequence], result: StepResult) -> None:
        """A step was run: what didn't hold is taken back, and counted."""
        if self._drafter is not None:
            self._drafter.note_following(result.following)
        if plan.drafts:
            self._rows.settle(plan, scheduled, result.token_ids)
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
    result: Outcome
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
        self._spans = spans_of(config)
        self.executor = executor = make_executor(config)
        self.facts = facts = executor.load(progress)
        self.capacity = capacity = executor.size_cache()
        executor.allocate_cache()
        self.scheduler = Scheduler(
            scheduler_config(config, facts, capacity.token_budget, capacity.most_sequences),
            capacity.num_blocks,
            capacity.token_budget,
            PrefillShare(told) if (told := config.prefill_tokens_beside_decodes) else None,
            capacity.layout,
            facts.max_model_len,
        )
        self.requests: dict[str, Request] = {}
        self.structured = StructuredOutputManager(
            facts.tokenizer, facts.vocab_size, facts.eos_token_ids
        )
        overlaps = config.plans_ahead(executor.overlaps)
        self.adapters = AdapterPool.of(executor.adapters)
        self._input_processor = InputProcessor(
            config, facts, self.scheduler.capacity_of, looks_ahead=overlaps
        )
        self._admission = AdapterAdmission(
            self.adapters, self._input_processor.check_vocabulary, facts.vocab_size
        )
        self._entrance = Entrance(self._admission, self.structured)
        self._counters = EngineCounters(self.scheduler)
        self._exits = Exits(
            self.scheduler,
            self.structured,
            self._counters,
            self.requests,
            facts.eos_token_ids,
            executor.detach,
            self._ended,
        )
        self._harvest = Harvest(self.scheduler, self.structured, self._counters, self._exits)
        self._most_in_flight = 1 if overlaps else 0
        self.drafter = make_drafter(
            config,
            facts,
            overlaps=overlaps,
            possible=self.structured.possible,
            host=executor.drafts,
        )
        self._drafts = CoreDrafts(self.drafter, self.scheduler, self._counters)
        #: Follows how long prompts take; set where that bounds them beside decodes.
        self.pace: PrefillPace | None = None
        #: Hears before each step which sequences those under way hold then.
        self.before_step: Callable[[list[Sequence]], None] | None = None
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
        if self.executor.asleep:
            raise EngineSleeping("The model sleeps until an operator wakes it up.")
        if message.request_id in self.requests:
            raise InvalidRequest(
                f"request_id {message.request_id!r} is in use.", param="request_id"
            )
        message = without_kv_quota(message, self.facts)
        self._input_processor.check(message, self._admission.vocab_size(message))
        if message.prompt_embeds is not None:
            prompt_embeds = tensor_of(message.prompt_embeds)
            message = msgspec.structs.replace(message, prompt_embeds=None)
        self._admission.check(message)
        if prompt_embeds is not None:
            self._input_processor.check_embeds(message, prompt_embeds)
        waiting = len(self.scheduler.waiting) + self._entrance.num_waiting
        if waiting + message.sampling.num_running > self.config.max_waiting:
            raise EngineOverloaded(f"{waiting} requests wait already.")
        request = self._input_processor.request(message, on_done, prompt_embeds)
        ready = self._admit(request)
        self._attach(request, prompt_embeds)
        if ready:
            self._queue(request)
        self.requests[message.request_id] = request
        return request

    def _ended(self, request: Request) -> None:
        """A request's last output has ended."""
        self.adapters.leave(request)
        if self._spans is not None:
            self._spans.ended(request)

    def _admit(self, request: Request) -> bool:
        """Whether nothing has to come first."""
        try:
            return self._entrance.admit(request)
        except QuireError:
            self.adapters.leave(request)
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
            if request.searches and sequence.index > 0:
                self.scheduler.add_parked(sequence)
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
            wanted = index is None or (index == sequence.index and not request.searches)
            if wanted and not sequence.finished:
                deltas += self._exits.finish(sequence, reason)
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. Requests of a model that sleeps wait."""
        if self.executor.asleep:
            return False
        return bool(self.scheduler.has_work or self._entrance.busy or self._steps_in_flight)

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Schedule, execute, update: new tokens of all sequences that got one.

        With async scheduling a step is only begun here, and the one before it updated: the tokens
        come one call later.
        """
        started = time.perf_counter()
        deltas = self._let_in() if self._entrance.busy else []
        deltas += self._complete_down_to(self._most_beside)  # an interrupt may leave one more
        begun = self._begin()
        for ended in self.scheduler.take_refused():
            deltas += self._exits.refuse(*ended)
        if begun is not None:
            self._steps_in_flight.append(begun)
        deltas += self._complete_down_to(self._most_in_flight if begun else 0)
        self._counters.note_step(started, None if begun is None else begun.plan)
        if begun is not None and not self._most_in_flight:
            seconds = time.perf_counter() - started
            if self.pace is not None:
                load = self.scheduler.prompt_load
                self.pace.note(load, begun.plan.num_decodes, seconds)
            self._drafts.note_step(begun.plan, seconds)
        return deltas

    @property
    def under_way(self) -> list[Sequence]:
        """Sequences of the steps that were begun and aren't updated yet."""
        return [each for step in self._steps_in_flight for each in step.scheduled]

    @property
    def _most_beside(self) -> int:
        """Steps that may be in flight while the next one is begun."""
        if self._most_in_flight and self.scheduler.isolates:
            return 0
        return self._most_in_flight

    def _begin(self) -> StepInFlight | None:
        """Schedule a step and have it run; None when there is nothing to compute now."""
        plan, scheduled = self.scheduler.schedule()
        if self.before_step is not None:
            self.before_step([*self.under_way, *scheduled] if self._steps_in_flight else scheduled)
        if not scheduled:
            self.executor.prepare(plan)
            if not self._steps_in_flight:
                self.scheduler.park_idle()
            return None
        masks = None
        if self.structured.has_masks:
            if self._steps_in_flight:  # they can be begun once the step before has been followed
                plan.awaits_masks = True
            else:
                masks = self._begin_masks(plan)
                plan.awaits_masks = masks is not None
        return StepInFlight(plan, scheduled, self._execute(plan), masks)

    def _begin_masks(self, plan: StepPlan) -> Future[GrammarOutput] | None:
        """Start on the masks of the step that was scheduled last; they go to the executor."""
        masks = self.structured.begin_masks(plan)
        if masks is not None:
            masks.add_done_callback(partial(_hand_over, self.executor.give_masks, plan.step))
        return masks

    def _execute(self, plan: StepPlan) -> Outcome:
        """The step's result: to come, or there already without async scheduling."""
        if self._most_in_flight:
            return self.executor.submit(plan)
        result: Future[StepResult] = Future()
        try:
            result.set_result(self.executor.execute(plan))
        except Exception as error:  # `_recover` takes the step back
            result.set_exception(error)
        return result

    def _complete_down_to(self, count: int) -> list[TokenDelta]:
        """Update the oldest steps until so many are in flight."""
        deltas: list[TokenDelta] = []
        while len(self._steps_in_flight) > count:
            deltas += self._complete()
        return deltas

    def _complete(self) -> list[TokenDelta]:
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
        deltas = self._harvest.take(step.plan, step.scheduled, result, masks)
        for later in self._steps_in_flight:
            if later.plan.awaits_masks:
                later.masks = self._begin_masks(later.plan)
                if later.masks is None:
                    self.executor.give_masks(GrammarOutput(later.plan.step))
        return deltas

    def _let_in(self) -> list[TokenDelta]:
        """Queue the requests that wait for nothing any more; answer those that can't be served."""
        deltas: list[TokenDelta] = []
        for request, error in self._entrance.take_ready(self._idles):
            if error is None:
                self._queue(request)
                continue
            for sequence in request.sequences:
                if not sequence.finished:  # a search's beams end together
                    deltas += self._exits.refuse(sequence, error)
        return deltas

    def _idles(self) -> bool:
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
        self.scheduler.undo(*((each.plan, each.scheduled) for each in failed))
        alive = [sequence for sequence in step.scheduled if not sequence.finished]
        if len(step.scheduled) > 1 or not alive:
            return []
        return self._exits.fail(alive[0], f"{type(error).__name__}: {error}")

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

    def stand_down(self) -> list[TokenDelta]:
        """Have all that runs give its blocks back and wait: it goes on with the next step, as after
        a preemption. Returns what the steps under way brought.
        """
        deltas = self._complete_down_to(0)
        self.scheduler.preempt_all()
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while any request holds blocks."""
        self._drafts.reset()
        return self.scheduler.kv.pool.reset_cache()

    @property
    def is_sleeping(self) -> bool:
        """Whether some of the memory is given back."""
        return self.executor.asleep

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
        deltas = self.stand_down()
        if not self.scheduler.kv.pool.reset_cache():
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
        if self.executor.asleep:
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
        self.adapters.fill(stats)
        return stats


def _hand_over(
    give: Callable[[GrammarOutput], None], step: int, masks: Future[GrammarOutput]
) -> None:
    """Give a step its masks, or the reason why there are none."""
    error = masks.exception()
    give(masks.result() if error is None else GrammarOutput(step, failure=f"Masks: {error!r}"))
