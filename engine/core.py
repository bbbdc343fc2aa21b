"""`EngineCore`: requests in, token deltas out. `step()` is the engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from engine.accounting import Accounts
from engine.admission import Admission
from engine.config import EngineConfig
from engine.errors import EngineOverloaded, EngineSleeping, InvalidRequest
from engine.executor.outcome import Outcome
from engine.executor.single import SingleExecutor
from engine.exits import Exits
from engine.harvest import Harvest
from engine.pooling.requests import scheduler_config, without_kv_quota
from engine.protocol import SLEEP_LEVELS, SLEEP_TAGS, EngineRequest, EngineStats, TokenDelta
from engine.scheduler import Request, Scheduler, Sequence, StepPlan, StepResult
from engine.scheduler.prefill_pace import PrefillPace
from engine.scheduler.prefill_share import PrefillShare
from engine.structured.manager import StructuredOutputs

log = logging.getLogger(__name__)

#: How long a step waits for a grammar when there is nothing else to do.
_GRAMMAR_WAIT_S = 0.01


class Step(NamedTuple):
    """A step that was begun: its plan, the plan's sequences in order, and what comes of it."""

    plan: StepPlan
    scheduled: list[Sequence]
    result: Outcome


class EngineCore:
    """One replica's engine. Not thread-safe: one thread calls everything.

    Args:
        config: the replica's settings.
        progress: called with (done, total) while weights load.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.config = config
        self.executor = executor = SingleExecutor(config, progress)
        self.loaded = loaded = executor.loaded
        self.scheduler = Scheduler(
            scheduler_config(config, loaded, executor.token_budget),
            executor.num_blocks,
            executor.token_budget,
            PrefillShare(told) if (told := config.prefill_tokens_beside_decodes) else None,
            executor.layout,
            loaded.max_model_len,
        )
        self.requests: dict[str, Request] = {}
        self.structured = StructuredOutputs(
            loaded.tokenizer, loaded.spec.vocab_size, loaded.eos_token_ids
        )
        overlaps = config.plans_ahead(executor.device.type)
        self._admission = Admission(
            config, loaded, self.scheduler.capacity_of, looks_ahead=overlaps
        )
        self._accounts = Accounts(self.scheduler)
        self._exits = Exits(
            self.scheduler, self.structured, self._accounts, self.requests, loaded.eos_token_ids
        )
        self._harvest = Harvest(self.scheduler, self.structured, self._accounts, self._exits)
        self._most_in_flight = 1 if overlaps else 0
        #: Follows how long prompts take; set where that bounds them beside decodes.
        self.pace: PrefillPace | None = None
        self._steps_in_flight: deque[Step] = deque()

    # -- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        message: EngineRequest,
        on_done: Callable[[], None] | None = None,
        *,
        prompt_embeds: Tensor | None = None,
    ) -> Request:
        """Queue a request. Nothing is allocated before all checks have passed.

        `prompt_embeds`: float [num_prompt_tokens, hidden] in the place of the prompt ids' own.

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
        message = without_kv_quota(message, self.loaded)
        self._admission.check(message)
        if prompt_embeds is not None:
            self._admission.check_embeds(message, prompt_embeds)
        waiting = len(self.scheduler.waiting) + self.structured.num_waiting
        if waiting + message.sampling.num_running > self.config.max_waiting:
            raise EngineOverloaded(f"{waiting} requests wait already.")
        request = self._admission.request(message, on_done, prompt_embeds)
        if self.structured.admit(request):
            self._queue(request)
        self.requests[message.request_id] = request
        return request

    def _queue(self, request: Request) -> None:
        """Hand a request's sequences to the scheduler."""
        for sequence in request.sequences:
            if request.beams is not None and sequence.index > 0:
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
            wanted = index is None or (index == sequence.index and request.beams is None)
            if wanted and not sequence.finished:
                deltas += self._exits.finish(sequence, reason)
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. Requests of a model that sleeps wait."""
        if self.executor.asleep:
            return False
        return bool(self.scheduler.has_work or self.structured.num_waiting or self._steps_in_flight)

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Schedule, execute, update: new tokens of all sequences that got one.

        With async scheduling a step is only begun here, and the one before it updated: the tokens
        come one call later.
        """
        started = time.perf_counter()
        deltas = self._take_compiled() if self.structured.num_waiting else []
        deltas += self._complete_down_to(self._most_in_flight)  # an interrupt may leave one more
        begun = self._begin()
        for ended in self.scheduler.take_refused():
            deltas += self._exits.refuse(*ended)
        if begun is not None:
            self._steps_in_flight.append(begun)
        deltas += self._complete_down_to(self._most_in_flight if begun else 0)
        self._accounts.note_step(started, begun is not None)
        if self.pace is not None and begun is not None and not self._most_in_flight:
            self.pace.note(begun.plan, time.perf_counter() - started)
        return deltas

    def _begin(self) -> Step | None:
        """Schedule a step and have it run; None when there is nothing to compute now."""
        plan, scheduled = self.scheduler.schedule()
        if not scheduled:
            self.executor.prepare(plan)
            if not self._steps_in_flight:
                self.scheduler.park_idle()
            return None
        if self._steps_in_flight:
            plan.mask = self.structured.promise_masks()
        else:
            plan.mask = self.structured.begin_masks()
        return Step(plan, scheduled, self._execute(plan))

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
        deltas = self._harvest.take(step.plan, step.scheduled, result)
        for later in self._steps_in_flight:
            if later.plan.mask is not None:
                self.structured.keep_promise(later.plan.mask)
        return deltas

    def _take_compiled(self) -> list[TokenDelta]:
        """Queue the requests whose grammar is there now; answer those whose grammar is bad."""
        deltas: list[TokenDelta] = []
        wait = 0.0 if self.scheduler.has_work else _GRAMMAR_WAIT_S
        for request, error in self.structured.take_ready(wait):
            if error is None:
                self._queue(request)
            else:
                for sequence in request.sequences:
                    if not sequence.finished:
                        deltas += self._exits.refuse(sequence, error)
        return deltas

    def _recover(self, step: Step, error: Exception) -> list[TokenDelta]:
        """A step failed: blame its only sequence, or let each of them run alone from here on."""
        log.error(
            "Step %d failed with %d sequences", step.plan.step, len(step.scheduled), exc_info=error
        )
        failed = list(self._steps_in_flight)
        self._steps_in_flight.clear()
        for each in failed:
            # Nothing of them may still be at work on the next step.
            each.result.exception()
            if each.plan.mask is not None and each is step:
                each.plan.mask.exception()
        self.executor.resume()
        self.scheduler.undo(*((each.plan, each.scheduled) for each in failed))
        alive = [sequence for sequence in step.scheduled if not sequence.finished]
        if len(step.scheduled) > 1 or not alive:
            return []
        return self._exits.fail(alive[0], f"{type(error).__name__}: {error}")

    # -- for operators ------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while any request holds blocks."""
        return self.scheduler.kv.pool.reset_cache()

    @property
    def is_sleeping(self) -> bool:
        """Whether some of the memory is given back."""
        return self.executor.asleep

    def sleep(self, level: int = 1) -> list[TokenDelta]:
        """Give memory back until `wake_up`: at level 1 the KV cache (on a GPU the weights too, to
        host memory), at level 2 the weights as well.

        Requests that run go on when it wakes up, as after a preemption. The prefix cache is empty
        then. Returns what the steps under way brought.

        Raises:
            InvalidRequest: there's no such level, or `enable_sleep_mode` is off.
            ConfigError: the model can't sleep.
        """
        if isinstance(level, bool) or level not in SLEEP_LEVELS:
            raise InvalidRequest(f"level must be 1 or 2, got {level!r}.", param="level")
        if not self.config.enable_sleep_mode:
            raise InvalidRequest("Sleeping needs enable_sleep_mode.", param="enable_sleep_mode")
        self.executor.check_sleep()
        deltas = self._complete_down_to(0)
        self.scheduler.preempt_all()
        if not self.scheduler.kv.pool.reset_cache():
            raise RuntimeError("Blocks are in use though nothing runs.")
        self.executor.sleep(level)
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

    def reset_stats(self) -> None:
        """Start the totals anew."""
        self._accounts.reset()

    @property
    def stats(self) -> EngineStats:
        """Totals since the start; `snapshot` also brings the load up to date."""
        return self._accounts.stats

    def snapshot(self) -> EngineStats:
        """Load and totals as of now."""
        return self._accounts.snapshot(self.structured.num_waiting)
