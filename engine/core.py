"""`EngineCore`: requests in, token deltas out. `step()` is the engine."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import EngineOverloaded, InvalidRequest, KVPoolTooSmall, QuireError
from engine.executor.single import SingleExecutor
from engine.kv_cache.hashing import extra_key
from engine.outputs import delta_of, error_delta, refusal_delta
from engine.protocol import EngineRequest, EngineStats, TokenDelta
from engine.scheduler import Request, Scheduler, Sequence, StepPlan, StepResult
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
        self.executor = SingleExecutor(config, progress)
        self.loaded = self.executor.loaded
        self.scheduler = Scheduler(
            config,
            self.executor.num_blocks,
            self.executor.token_budget,
            self._prefill_limit(online),
            self.executor.layout,
            self.loaded.max_model_len,
        )
        self.requests: dict[str, Request] = {}
        self.stats = EngineStats(num_blocks=self.executor.num_blocks)
        self._eos = frozenset(self.loaded.eos_token_ids)
        self._next_seq_id = 0
        self.structured = StructuredOutputs(
            self.loaded.tokenizer, self.loaded.spec.vocab_size, self.loaded.eos_token_ids
        )

    def _prefill_limit(self, online: bool) -> int:
        """`prefill_tokens_beside_decodes`; by default what two cores compute in 0.2 s."""
        if self.config.prefill_tokens_beside_decodes is not None or not online:
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
        self._check(message)
        request = Request(message, arrived_at=time.time(), on_done=on_done)
        params = message.sampling
        seed = self._seed(message)
        room = min(self.loaded.max_model_len, self.scheduler.capacity_tokens)
        budget = params.output_budget(len(message.prompt_token_ids), room)
        key = extra_key(message.cache_namespace, message.adapter)
        for index in range(params.num_sequences):
            if index in message.skip_indices:
                continue
            resumed = message.resume_token_ids[index] if message.resume_token_ids else []
            sequence = Sequence(
                seq_id=self._next_seq_id,
                request=request,
                index=index,
                token_ids=message.prompt_token_ids + resumed,
                num_prompt_tokens=len(message.prompt_token_ids),
                max_output_tokens=budget,
                # Odd, so that no two outputs of a request share a seed.
                seed=(seed + 0x9E3779B97F4A7C15 * index) % 2**64,
                extra_key=key,
                num_resumed_tokens=len(resumed),
            )
            if params.prompt_logprobs is not None and index == 0:
                sequence.prompt_logprobs = [None]
            self._next_seq_id += 1
            request.sequences.append(sequence)
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
        deltas = []
        for sequence in request.sequences:
            if sequence.finished or (index is not None and sequence.index != index):
                continue
            deltas.append(self._finish(sequence, reason))
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work or self.structured.num_waiting > 0

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while any request holds blocks."""
        return self.scheduler.kv.pool.reset_cache()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the pool's books balance."""
        self.scheduler.check_integrity()

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Schedule, execute, update: new tokens of all sequences that got one."""
        started = time.perf_counter()
        refused = self._take_compiled() if self.structured.num_waiting else []
        plan, scheduled = self.scheduler.schedule()
        plan.mask = self.structured.begin_masks()
        try:
            result = self.executor.execute(plan)
        except Exception as error:
            if plan.mask is not None:
                plan.mask.exception()  # its thread mustn't still be at work on the next step
            return refused + self._recover(plan, scheduled, error)
        deltas = refused + self._update(plan, scheduled, result)
        self.stats.steps_total += bool(scheduled)
        self.stats.last_step_ms = (time.perf_counter() - started) * 1000
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
                deltas += [self._refuse(sequence, error) for sequence in left]
        return deltas

    def _update(
        self, plan: StepPlan, scheduled: list[Sequence], result: StepResult
    ) -> list[TokenDelta]:
        """Append what was sampled, find what has ended, and make the deltas."""
        deltas = []
        special = bool(result.prompt_logprobs or result.errors)
        charge = self.scheduler.waiting.charge_output
        for at, (sequence, token_id) in enumerate(zip(scheduled, result.token_ids, strict=True)):
            sequence.isolated = False
            if special:
                if scores := result.prompt_logprobs.get(sequence.seq_id):
                    sequence.prompt_logprobs = [*(sequence.prompt_logprobs or []), *scores]
                if reason := result.errors.get(sequence.seq_id):
                    deltas.append(self._fail(sequence, reason))
                    continue
            if token_id < 0:
                continue
            token_ids = [token_id]
            if sequence.grammar is not None:
                try:
                    token_ids = self.structured.follow(sequence, token_id, plan)
                except QuireError as error:
                    deltas.append(self._refuse(sequence, error))
                    continue
            self.stats.generation_tokens_total += len(token_ids)
            charge(sequence)
            first = sequence.first_token_at == 0.0
            if first:
                sequence.first_token_at = time.time()
            sequence.token_ids += token_ids
            logprobs = result.logprobs[at] if result.logprobs else None
            ended = self._ended(sequence, token_ids[-1])
            if ended is not None:
                self._leave(sequence, *ended)
            deltas.append(delta_of(sequence, token_ids, logprobs, first=first))
        return deltas

    def _ended(self, sequence: Sequence, token_id: int) -> tuple[str, int | None] | None:
        """(finish reason, stop token id) when this token ends the sequence."""
        params = sequence.request.message.sampling
        generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        if sequence.grammar is not None and token_id in self._eos and sequence.grammar.complete:
            return "stop", None
        if generated >= params.min_tokens:
            if token_id in self._eos and not params.ignore_eos:
                return "stop", None
            if params.stop_token_ids and token_id in params.stop_token_ids:
                return "stop", token_id
        if generated >= sequence.max_output_tokens:
            return "length", None
        return None

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
        return [self._fail(scheduled[0], f"{type(error).__name__}: {error}")]

    # -- the end of a sequence ----------------------------------------------------------------

    def _fail(self, sequence: Sequence, reason: str) -> TokenDelta:
        """End a sequence with an error that its client sees."""
        self._leave(sequence, "error")
        return error_delta(sequence, reason)

    def _refuse(self, sequence: Sequence, error: QuireError) -> TokenDelta:
        """End a sequence for a reason that lies in its request."""
        self._leave(sequence, "error")
        return refusal_delta(sequence, error)

    def _finish(self, sequence: Sequence, reason: str) -> TokenDelta:
        """End a sequence from outside."""
        self._leave(sequence, reason)
        return delta_of(sequence, [], None, first=sequence.first_token_at == 0.0)

    def _leave(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """Take a sequence out; forget its request when it was the last."""
        self.scheduler.finish(sequence, reason, stop_reason)
        self.structured.leave(sequence)
        self._account(sequence, reason)
        request = sequence.request
        if request.finished:
            self.requests.pop(request.request_id, None)
            if request.on_done is not None:
                request.on_done()

    def _account(self, sequence: Sequence, reason: str) -> None:
        """Totals and the flight record of a sequence that ends."""
        now, flight = time.time(), sequence.flight
        started = sequence.first_scheduled_at or now
        first_token = sequence.first_token_at or now
        flight.queue_time = max(0.0, started - sequence.request.arrived_at)
        flight.prefill_time = max(0.0, first_token - started)
        flight.decode_time = max(0.0, now - first_token)
        finished = self.stats.requests_finished_total
        finished[reason] = finished.get(reason, 0) + 1
        if sequence.index == 0:
            self.stats.prompt_tokens_total += sequence.num_prompt_tokens

    # -- checks and figures -------------------------------------------------------------------

    def _check(self, message: EngineRequest) -> None:
        """Refuse what can't run, before anything is allocated."""
        prompt, params = message.prompt_token_ids, message.sampling
        if message.request_id in self.requests:
            raise InvalidRequest(
                f"request_id {message.request_id!r} is in use.", param="request_id"
            )
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        vocab = self.loaded.spec.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise InvalidRequest(
                f"The prompt holds token {wrong}, but the vocabulary has {vocab} entries.",
                param="prompt",
            )
        params.check_against_model(
            vocab_size=vocab,
            num_prompt_tokens=len(prompt),
            max_model_len=self.loaded.max_model_len,
            max_logprobs=self.config.max_logprobs,
        )
        if message.adapter:
            raise InvalidRequest(f"There is no adapter {message.adapter!r}.", param="model")
        self._check_resumption(message)
        self._check_pool(len(prompt), params.max_tokens)
        waiting = len(self.scheduler.waiting) + self.structured.num_waiting
        if waiting + params.num_sequences > self.config.max_waiting:
            raise EngineOverloaded(f"{waiting} requests wait already.")

    def _check_resumption(self, message: EngineRequest) -> None:
        """What another replica had generated must be consistent with the request."""
        count, resumed = message.sampling.num_sequences, message.resume_token_ids
        if resumed and len(resumed) != count:
            raise InvalidRequest(
                "resume_token_ids must hold one list an output.", param="resume_token_ids"
            )
        skipped = set(message.skip_indices)
        if skipped and (not skipped < set(range(count)) or not resumed):
            raise InvalidRequest("skip_indices is out of range.", param="skip_indices")
        budget = message.sampling.output_budget(
            len(message.prompt_token_ids), self.loaded.max_model_len
        )
        for index, token_ids in enumerate(resumed):
            if index not in skipped and len(token_ids) >= budget:
                raise InvalidRequest(
                    f"Output {index} has all of its {budget} tokens already.",
                    param="resume_token_ids",
                )

    def _check_pool(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """A request that can never fit the pool is refused at once, with both numbers."""
        capacity = self.scheduler.capacity_tokens
        needed = num_prompt_tokens + (max_tokens if max_tokens is not None else 1)
        if needed > capacity:
            raise KVPoolTooSmall(
                f"The request needs up to {needed} tokens of KV cache, "
                f"but this replica's pool holds {capacity}.",
                param="max_tokens" if num_prompt_tokens < capacity else "prompt",
            )

    def _seed(self, message: EngineRequest) -> int:
        """The request's seed; without one, from its id: the same on every replica that gets it."""
        if message.sampling.seed is not None:
            return message.sampling.seed
        digest = hashlib.sha256(f"{self.config.seed}:{message.request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def reset_stats(self) -> None:
        """Start the totals anew."""
        self.stats = EngineStats(num_blocks=self.executor.num_blocks)
        self.scheduler.num_preemptions = 0
        self.scheduler.kv.num_query_tokens = self.scheduler.kv.num_hit_tokens = 0

    def snapshot(self) -> EngineStats:
        """Load and totals as of now."""
        stats, scheduler = self.stats, self.scheduler
        stats.num_requests_running = len(scheduler.running)
        stats.num_requests_waiting = len(scheduler.waiting) + self.structured.num_waiting
        stats.kv_cache_usage_perc = scheduler.kv.pool.usage
        stats.num_free_blocks = scheduler.kv.pool.num_free
        stats.num_cached_blocks = scheduler.kv.pool.num_cached
        stats.num_preemptions_total = scheduler.num_preemptions
        stats.prefix_cache_queries_total = scheduler.kv.num_query_tokens
        stats.prefix_cache_hits_total = scheduler.kv.num_hit_tokens
        return stats
