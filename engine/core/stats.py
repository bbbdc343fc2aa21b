"""The engine's statistics: totals for the metrics, and the timeline of each sequence."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import WARMUP_REQUEST_ID, EngineRequest, TokenDelta
from engine.contract.metrics import Histograms
from engine.contract.observability import Tracing, context_of
from engine.contract.replica_state import EngineStats
from engine.scheduler import Request, Scheduler, Sequence, StepPlan, StepResult
from engine.scheduler.plan import is_decode

# -- Tracing: a span for each finished request, by OpenTelemetry's conventions for gen_ai.


_NS = 1_000_000_000


class RequestSpans:
    """Makes spans named `llm_request`, as vLLM does, below the gateway's. Never holds prompt
    text.
    """

    def __init__(self, tracing: Tracing, model: str) -> None:
        self._tracing, self._model = tracing, model

    def record_finished(self, request: Request) -> None:
        """Record a request that has just finished, unless it is the engine's own warm-up."""
        from opentelemetry.trace import SpanKind, StatusCode

        if request.message.request_id == WARMUP_REQUEST_ID:
            return

        now = time.time()
        span = self._tracing.tracer.start_span(
            "llm_request",
            context=context_of(request.message.trace_headers),
            kind=SpanKind.SERVER,
            start_time=int(request.arrival_time * _NS),
            attributes=_request_attributes(request.message, self._model)
            | _result_attributes(request, now),
        )
        if any(sequence.finish_reason == "error" for sequence in request.sequences):
            span.set_status(StatusCode.ERROR)
        span.end(int(now * _NS))

    def close(self) -> None:
        """Send the remaining spans."""
        self._tracing.close()


def make_request_spans(config: EngineConfig) -> RequestSpans | None:
    """The recorder of requests' spans; None: tracing is off."""
    if config.otlp_traces_endpoint is None:
        return None
    instance = f"{socket.gethostname()}-{os.getpid()}"
    return RequestSpans(Tracing(config.otlp_traces_endpoint, "quire-engine", instance), config.name)


def _request_attributes(message: EngineRequest, model: str) -> dict[str, Any]:
    params = message.sampling
    attributes = {
        "gen_ai.operation.name": "text_completion" if message.pooling is None else "embeddings",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.id": message.request_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }
    if message.pooling is not None:
        return attributes
    return attributes | {
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        **({} if params.max_tokens is None else {"gen_ai.request.max_tokens": params.max_tokens}),
    }


def _result_attributes(request: Request, now: float) -> dict[str, Any]:
    """Attributes of the result. Token counts have both the current and the former names."""
    sequences = request.sequences[: request.message.sampling.num_sequences]
    first = sequences[0]
    flight = first.timeline
    prompt = first.num_prompt_tokens
    output = sum(sequence.num_output_tokens for sequence in sequences)
    attributes = {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": output,
        "gen_ai.usage.num_sequences": len(sequences),
        "gen_ai.usage.cache_read.input_tokens": first.num_cached_tokens,
        "gen_ai.response.finish_reasons": [row.finish_reason or "" for row in sequences],
        "gen_ai.latency.e2e": now - request.arrival_time,
        "gen_ai.latency.time_in_queue": flight.queue_time,
        "gen_ai.latency.time_in_model_prefill": flight.prefill_time,
        "gen_ai.latency.time_in_model_decode": flight.decode_time,
        "gen_ai.latency.time_in_model_inference": flight.prefill_time + flight.decode_time,
        "quire.num_preemptions": sum(sequence.timeline.num_preemptions for sequence in sequences),
        "quire.num_steps": flight.num_steps,
    }
    if flight.model_forward_time:
        attributes["gen_ai.latency.time_in_model_forward"] = flight.model_forward_time
    if flight.model_execute_time:
        attributes["gen_ai.latency.time_in_model_execute"] = flight.model_execute_time
    if first.first_token_at:
        waited = first.first_token_at - request.arrival_time
        attributes["gen_ai.latency.time_to_first_token"] = waited
    return attributes


# -- The line of statistics in the engine's log.


log = logging.getLogger(__name__)

#: vLLM's.
INTERVAL_S = 5.0


class StatsLogger:
    """Logs throughput and load every `INTERVAL_S` unless the engine is idle."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._reset_at = time.time()
        self._prompt = self._generated = 0

    def log_if_due(self, snapshot: Callable[[], EngineStats]) -> None:
        """Log if the interval is over and anything ran in it."""
        now = time.time()
        if not self._enabled or now - self._reset_at < INTERVAL_S:
            return
        stats = snapshot()
        idle = not (stats.num_requests_running or stats.num_requests_waiting)
        prompt, generated, seconds = self._since(stats, now)
        if prompt or generated or not idle:
            _write(stats, prompt / seconds, generated / seconds)

    def log(self, snapshot: Callable[[], EngineStats]) -> None:
        """Log, whether or not anything ran since the last line."""
        stats = snapshot()
        prompt, generated, seconds = self._since(stats, time.time())
        _write(stats, prompt / seconds, generated / seconds)

    def _since(self, stats: EngineStats, now: float) -> tuple[int, int, float]:
        """Prompt tokens, new tokens and seconds since the last call."""
        prompt = stats.prompt_tokens_total - self._prompt
        generated = stats.generation_tokens_total - self._generated
        seconds = max(now - self._reset_at, 1e-3)
        self._reset_at, self._prompt = now, stats.prompt_tokens_total
        self._generated = stats.generation_tokens_total
        return prompt, generated, seconds


def _write(stats: EngineStats, prompt_rate: float, generation_rate: float) -> None:
    log.info(
        "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, "
        "waiting: %d, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%, preemptions: %d",
        prompt_rate,
        generation_rate,
        stats.num_requests_running,
        stats.num_requests_waiting,
        100 * stats.kv_cache_usage_perc,
        100 * stats.prefix_cache_hit_rate,
        stats.num_preemptions_total,
    )


# -- `RateMeter`: recent tokens per second, for vLLM's throughput gauges.


class RateMeter:
    """Averages over intervals of `INTERVAL_S`; reports that of the last complete one."""

    def __init__(self, now: float | None = None) -> None:
        self._reset_at = time.monotonic() if now is None else now
        self._prompt = self._generated = 0
        self._rates = (0.0, 0.0)

    def last_rates(self, stats: EngineStats, now: float | None = None) -> EngineStats:
        """The statistics with the averages filled in."""
        now = time.monotonic() if now is None else now
        if (seconds := now - self._reset_at) >= INTERVAL_S:
            prompt = stats.prompt_tokens_total - self._prompt
            generated = stats.generation_tokens_total - self._generated
            self._rates = (prompt / seconds, generated / seconds)
            self._reset_at, self._prompt = now, stats.prompt_tokens_total
            self._generated = stats.generation_tokens_total
        prompt_rate, generation_rate = self._rates
        return msgspec.structs.replace(
            stats,
            avg_prompt_throughput_toks_per_s=prompt_rate,
            avg_generation_throughput_toks_per_s=generation_rate,
        )


_OF_REQUESTS_AND_STEPS = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "model_forward_time_milliseconds",
    "model_execute_time_milliseconds",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
    "request_spec_decode_accepted_length",
    "iteration_tokens_total",
)


class EngineStatsCollector:
    """Totals since the start (or `reset`).

    Attributes:
        stats: the totals; their load figures are as of the last `snapshot`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._histograms = Histograms(*_OF_REQUESTS_AND_STEPS)
        self.stats = EngineStats(num_blocks=scheduler.kv.pool.num_blocks)

    def record_finished(self, sequence: Sequence, reason: str) -> None:
        """Close the timeline of a sequence that ends, and count it."""
        now, flight = time.time(), sequence.timeline
        started = sequence.first_scheduled_at or now
        first_token = sequence.first_token_at or now
        flight.queue_time = max(0.0, started - sequence.request.arrival_time)
        flight.prefill_time = max(0.0, first_token - started)
        flight.decode_time = max(0.0, now - first_token)
        message = sequence.request.message
        if sequence.request.is_beam_search and sequence.index >= message.sampling.n:
            return  # a beam that isn't an output
        finished = self.stats.requests_finished_total
        finished[reason] = finished.get(reason, 0) + 1
        if sequence.first_scheduled_at:
            self._observe(sequence, now)
        if flight.cold_reason:
            cold = self.stats.prefix_cold_total
            cold[flight.cold_reason] = cold.get(flight.cold_reason, 0) + 1

    def _observe(self, sequence: Sequence, now: float) -> None:
        """Observe the histograms of an output that started and has ended."""
        flight, observe = sequence.timeline, self._histograms.observe
        observe("request_queue_time_seconds", flight.queue_time)
        observe("request_prefill_time_seconds", flight.prefill_time)
        observe("request_decode_time_seconds", flight.decode_time)
        observe("request_inference_time_seconds", now - sequence.first_scheduled_at)
        if flight.model_forward_time:
            observe("model_forward_time_milliseconds", 1000 * flight.model_forward_time)
        if flight.model_execute_time:
            observe("model_execute_time_milliseconds", 1000 * flight.model_execute_time)
        observe("request_num_preemptions", flight.num_preemptions)
        computed = sequence.num_prompt_tokens - sequence.num_cached_tokens
        observe("request_prefill_kv_computed_tokens", max(0, computed))
        if flight.num_drafts:
            observe("request_spec_decode_accepted_length", flight.mean_accepted_length)

    def record_prompts(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """Count the prompt tokens that a step has computed.

        Of several outputs only the first one's are counted, and none twice after a preemption.
        """
        if not plan.num_prompt_tokens:
            return  # only a prompt's last token remains: counted with the first output
        for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
            if not is_decode(count):
                self.record_prompt(sequence, count)

    def record_prompt(self, sequence: Sequence, count: int) -> None:
        """Count tokens of a sequence's prompt that haven't been counted yet."""
        new = min(count, sequence.num_prompt_tokens - sequence.num_prompt_counted)
        sequence.num_prompt_counted += new
        if sequence.index == 0:
            self.stats.prompt_tokens_total += new

    def record_drafts(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step's drafts, and the accepted ones by position."""
        stats = self.stats
        for seq_id, token_ids in zip(plan.seq_ids, result.token_ids, strict=True):
            if (drafts := plan.drafts.get(seq_id)) is None:
                continue
            num_accepted = max(0, len(token_ids) - 1)
            stats.spec_decode_num_drafts_total += 1
            stats.spec_decode_num_draft_tokens_total += len(drafts)
            stats.spec_decode_num_accepted_tokens_total += num_accepted
            accepted_per_position = stats.spec_decode_num_accepted_tokens_per_pos_total
            accepted_per_position += [0] * (len(drafts) - len(accepted_per_position))
            for position in range(num_accepted):
                accepted_per_position[position] += 1

    def record_model_time(self, scheduled: list[Sequence], result: StepResult) -> None:
        """Add a step's measured times to the timelines of its sequences."""
        if result.forward_seconds or result.execute_seconds:
            for sequence in scheduled:
                sequence.timeline.model_forward_time += result.forward_seconds
                sequence.timeline.model_execute_time += result.execute_seconds

    def record_output(self, deltas: list[TokenDelta]) -> None:
        """Count the output tokens of a step's deltas."""
        self.stats.generation_tokens_total += sum([len(delta.token_ids) for delta in deltas])

    def record_step(self, started: float, plan: StepPlan | None) -> None:
        """Count a step that began at `started` (of `time.perf_counter`); None: the step was
        empty.
        """
        if plan is not None:
            self.stats.steps_total += 1
            self._histograms.observe("iteration_tokens_total", sum(plan.num_scheduled))
        self.stats.last_step_ms = (time.perf_counter() - started) * 1000

    def reset(self) -> None:
        """Reset the totals."""
        self._histograms = Histograms(*_OF_REQUESTS_AND_STEPS)
        self.stats = EngineStats(num_blocks=self._scheduler.kv.pool.num_blocks)
        self._scheduler.reset_counts()

    def snapshot(self, num_waiting_outside: int) -> EngineStats:
        """Current load and totals."""
        stats, scheduler = self.stats, self._scheduler
        stats.num_requests_running = len(scheduler.running)
        stats.num_requests_waiting = scheduler.num_waiting + num_waiting_outside
        stats.kv_cache_usage_perc = scheduler.kv.pool.usage
        stats.num_free_blocks = scheduler.kv.pool.num_free_blocks
        stats.num_cached_blocks = scheduler.kv.pool.num_cached
        stats.num_preemptions_total = scheduler.num_preemptions
        stats.prefix_cache_queries_total = scheduler.kv.num_query_tokens
        stats.prefix_cache_hits_total = scheduler.kv.num_hit_tokens
        stats.prefix_cache_hit_rate = scheduler.kv.recent_hit_rate
        stats.mm_cache_queries_total = scheduler.encoder_cache.num_queries
        stats.mm_cache_hits_total = scheduler.encoder_cache.num_hits
        residency = scheduler.kv.pool.residency.histograms
        stats.histograms = self._histograms.by_name | residency.by_name
        return stats
