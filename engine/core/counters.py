"""What the engine counts: totals for the metrics, and each sequence's flight record."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.contract.histograms import Histograms
from engine.contract.protocol import EngineStats, FlightRecord, TokenDelta
from engine.scheduler import Scheduler, Sequence, StepPlan
from engine.scheduler.plan import decodes

_OF_REQUESTS_AND_STEPS = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
    "request_spec_decode_accepted_length",
    "iteration_tokens_total",
)


class EngineCounters:
    """Totals since the start (or `reset`).

    Attributes:
        stats: the totals; load figures in it are as of the last `snapshot`.
        of_flights: told of each output that began and has ended, and of what histograms observe by.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._histograms = Histograms(*_OF_REQUESTS_AND_STEPS)
        self.stats = EngineStats(num_blocks=scheduler.kv.pool.num_blocks)
        self.of_flights: list[Callable[[FlightRecord, Callable[[str, float], None]], None]] = []

    def note_end(self, sequence: Sequence, reason: str) -> None:
        """Close the flight record of a sequence that ends, and count it."""
        now, flight = time.time(), sequence.flight
        started = sequence.first_scheduled_at or now
        first_token = sequence.first_token_at or now
        flight.queue_time = max(0.0, started - sequence.request.arrived_at)
        flight.prefill_time = max(0.0, first_token - started)
        flight.decode_time = max(0.0, now - first_token)
        message = sequence.request.message
        if sequence.request.searches and sequence.index >= message.sampling.n:
            return  # a beam that is no output
        finished = self.stats.requests_finished_total
        finished[reason] = finished.get(reason, 0) + 1
        if sequence.first_scheduled_at:
            self._observe(sequence, now)
        if flight.cold_reason:
            cold = self.stats.prefix_cold_total
            cold[flight.cold_reason] = cold.get(flight.cold_reason, 0) + 1

    def _observe(self, sequence: Sequence, now: float) -> None:
        """The histograms of an output that began and has ended."""
        flight, observe = sequence.flight, self._histograms.observe
        observe("request_queue_time_seconds", flight.queue_time)
        observe("request_prefill_time_seconds", flight.prefill_time)
        observe("request_decode_time_seconds", flight.decode_time)
        observe("request_inference_time_seconds", now - sequence.first_scheduled_at)
        observe("request_num_preemptions", flight.num_preemptions)
        computed = sequence.num_prompt_tokens - sequence.num_cached_tokens
        observe("request_prefill_kv_computed_tokens", max(0, computed))
        for more in self.of_flights:
            more(flight, observe)

    def note_prompts(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """Count the prompt tokens that a step has computed.

        Of several outputs the first one's alone, and none twice though it was preempted meanwhile.
        """
        if not plan.num_prompt_tokens:
            return  # a prompt's last token alone is counted when it has its first output
        for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
            if not decodes(count):
                self.note_prompt(sequence, count)

    def note_prompt(self, sequence: Sequence, count: int) -> None:
        """Count tokens of a sequence's prompt, at most those that were not counted yet."""
        new = min(count, sequence.num_prompt_tokens - sequence.num_prompt_counted)
        sequence.num_prompt_counted += new
        if sequence.index == 0:
            self.stats.prompt_tokens_total += new

    def note_output(self, deltas: list[TokenDelta]) -> None:
        """Count the output tokens of a step's deltas."""
        self.stats.generation_tokens_total += sum([len(delta.token_ids) for delta in deltas])

    def note_step(self, started: float, plan: StepPlan | None) -> None:
        """Count a step that began at `started` (of `time.perf_counter`); None: nothing to do."""
        if plan is not None:
            self.stats.steps_total += 1
            self._histograms.observe("iteration_tokens_total", sum(plan.num_scheduled))
        self.stats.last_step_ms = (time.perf_counter() - started) * 1000

    def reset(self) -> None:
        """Start the totals anew."""
        self._histograms = Histograms(*_OF_REQUESTS_AND_STEPS)
        self.stats = EngineStats(num_blocks=self._scheduler.kv.pool.num_blocks)
        self._scheduler.reset_counts()

    def snapshot(self, num_waiting_outside: int) -> EngineStats:
        """Load and totals as of now."""
        stats, scheduler = self.stats, self._scheduler
        stats.num_requests_running = len(scheduler.running)
        stats.num_requests_waiting = len(scheduler.waiting) + num_waiting_outside
        stats.kv_cache_usage_perc = scheduler.kv.pool.usage
        stats.num_free_blocks = scheduler.kv.pool.num_free
        stats.num_cached_blocks = scheduler.kv.pool.num_cached
        stats.num_preemptions_total = scheduler.num_preemptions
        stats.prefix_cache_queries_total = scheduler.kv.num_query_tokens
        stats.prefix_cache_hits_total = scheduler.kv.num_hit_tokens
        residency = scheduler.kv.pool.residency.histograms
        stats.histograms = self._histograms.by_name | residency.by_name
        return stats
