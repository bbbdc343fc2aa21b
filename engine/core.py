"""`EngineCore`: requests in, token deltas out. `step()` is the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.accounting import Accounts
from engine.admission import Admission
from engine.config import EngineConfig
from engine.errors import EngineOverloaded, InvalidRequest
from engine.executor.single import SingleExecutor
from engine.exits import Exits
from engine.harvest import Harvest
from engine.pooling.requests import scheduler_config
from engine.protocol import EngineRequest, EngineStats, TokenDelta
from engine.scheduler import Request, Scheduler, Sequence, StepPlan
from engine.structured.manager import StructuredOutputs

log = logging.getLogger(__name__)

#: How long a step waits for a grammar when there is nothing else to do.
_GRAMMAR_WAIT_S = 0.01
#: Arithmetic of the prompt tokens that may share a step with decodes: 0.17 s at 120 GFLOP/s, which
#: two cores reach. Fewer tokens than the least would waste the weights that a step reads anyway.
_PREFILL_FLOP_BESIDE_DECODES = 20e9
_LEAST_PREFILL_TOKENS = 32


class EngineCore:
    """One replica's engine. Not thread-safe: one thread calls everything.

    Args:
        config: the replica's settings.
        progress: called with (done, total) while weights load.
        online: somebody watches the tokens come, so prompts leave room for others' decodes.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        online: bool = False,
    ) -> None:
        self.config = config
        self.executor = executor = SingleExecutor(config, progress)
        self.loaded = loaded = executor.loaded
        self.scheduler = Scheduler(
            scheduler_config(config, loaded, executor.token_budget),
            executor.num_blocks,
            executor.token_budget,
            self._prefill_limit(online),
            executor.layout,
            loaded.max_model_len,
        )
        self.requests: dict[str, Request] = {}
        self.structured = StructuredOutputs(
            loaded.tokenizer, loaded.spec.vocab_size, loaded.eos_token_ids
        )
        self._admission = Admission(config, loaded, self.scheduler.capacity_of)
        self._accounts = Accounts(self.scheduler)
        self._exits = Exits(
            self.scheduler, self.structured, self._accounts, self.requests, loaded.eos_token_ids
        )
        self._harvest = Harvest(self.scheduler, self.structured, self._accounts, self._exits)

    def _prefill_limit(self, online: bool) -> int:
        """`prefill_tokens_beside_decodes`; by default what two cores compute in 0.2 s."""
        pools = self.loaded.pooler is not None
        if self.config.prefill_tokens_beside_decodes is not None or not online or pools:
            return self.config.prefill_tokens_beside_decodes or 0
        tokens = int(_PREFILL_FLOP_BESIDE_DECODES / (2 * self.loaded.spec.num_parameters))
        return max(_LEAST_PREFILL_TOKENS, tokens // 16 * 16)

    # -- requests -----------------------------------------------------------------------------

    def add_request(
        self, message: EngineRequest, on_done: Callable[[], None] | None = None
    ) -> Request:
        """Queue a request. Nothing is allocated before all checks have passed.

        Raises:
            InvalidRequest: a field is out of range for this model, or the id is in use.
            KVPoolTooSmall: it could never fit the pool.
            EngineOverloaded: the waiting queue is full.
        """
        if message.request_id in self.requests:
            raise InvalidRequest(
                f"request_id {message.request_id!r} is in use.", param="request_id"
            )
        self._admission.check(message)
        waiting = len(self.scheduler.waiting) + self.structured.num_waiting
        if waiting + message.sampling.num_sequences > self.config.max_waiting:
            raise EngineOverloaded(f"{waiting} requests wait already.")
        request = self._admission.request(message, on_done)
        if self.structured.admit(request):
            self._queue(request)
        self.requests[message.request_id] = request
        return request

    def _queue(self, request: Request) -> None:
        """Hand a request's sequences to the scheduler."""
        for sequence in request.sequences:
            if not sequence.finished:
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
        return [
            self._exits.finish(sequence, reason)
            for sequence in request.sequences
            if not sequence.finished and index in (None, sequence.index)
        ]

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work or self.structured.num_waiting > 0

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Schedule, execute, update: new tokens of all sequences that got one."""
        started = time.perf_counter()
        refused = self._take_compiled() if self.structured.num_waiting else []
        plan, scheduled = self.scheduler.schedule()
        refused += [self._exits.refuse(*ended) for ended in self.scheduler.take_refused()]
        plan.mask = self.structured.begin_masks()
        try:
            result = self.executor.execute(plan)
        except Exception as error:
            if plan.mask is not None:
                plan.mask.exception()  # its thread mustn't still be at work on the next step
            return refused + self._recover(plan, scheduled, error)
        deltas = refused + self._harvest.take(plan, scheduled, result)
        self._accounts.note_step(started, bool(scheduled))
        return deltas

    def _take_compiled(self) -> list[TokenDelta]:
        """Queue the requests whose grammar is there now; answer those whose grammar is bad."""
        deltas = []
        wait = 0.0 if self.scheduler.has_work else _GRAMMAR_WAIT_S
        for request, error in self.structured.take_ready(wait):
            if error is None:
                self._queue(request)
            else:
                left = [sequence for sequence in request.sequences if not sequence.finished]
                deltas += [self._exits.refuse(sequence, error) for sequence in left]
        return deltas

    def _recover(
        self, plan: StepPlan, scheduled: list[Sequence], error: Exception
    ) -> list[TokenDelta]:
        """A step failed: blame its only sequence, or let each of them run alone from here on."""
        log.error("Step %d failed with %d sequences", plan.step, len(scheduled), exc_info=error)
        if not scheduled:
            raise error
        self.scheduler.undo(plan, scheduled)
        if len(scheduled) > 1:
            return []
        return [self._exits.fail(scheduled[0], f"{type(error).__name__}: {error}")]

    # -- for operators ------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while any request holds blocks."""
        return self.scheduler.kv.pool.reset_cache()

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
