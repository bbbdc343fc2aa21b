"""The periodic line of statistics in a replica's log."""

from __future__ import annotations

import logging
import time

from engine.core.engine_core import EngineCore

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatsLog:
    """Logs throughput and load every `INTERVAL_S` while there is something to say."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._at = time.time()
        self._prompt = self._generated = 0

    def maybe(self, core: EngineCore) -> None:
        """Log if the interval is over and anything ran in it."""
        now = time.time()
        if not self._enabled or now - self._at < INTERVAL_S:
            return
        stats, seconds = core.snapshot(), now - self._at
        prompt = stats.prompt_tokens_total - self._prompt
        generated = stats.generation_tokens_total - self._generated
        self._at, self._prompt = now, stats.prompt_tokens_total
        self._generated = stats.generation_tokens_total
        if not (prompt or generated or stats.num_requests_running or stats.num_requests_waiting):
            return
        hits = stats.prefix_cache_hits_total / max(1, stats.prefix_cache_queries_total)
        log.info(
            "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, "
            "waiting: %d, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%, preemptions: %d",
            prompt / seconds,
            generated / seconds,
            stats.num_requests_running,
            stats.num_requests_waiting,
            100 * stats.kv_cache_usage_perc,
            100 * hits,
            stats.num_preemptions_total,
        )
