"""The line of statistics in an engine's log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.contract.replica_state import EngineStats

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatsLog:
    """Logs throughput and load every `INTERVAL_S` while there is something to say."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._at = time.time()
        self._prompt = self._generated = 0

    def maybe(self, snapshot: Callable[[], EngineStats]) -> None:
        """Log if the interval is over and anything ran in it."""
        now = time.time()
        if not self._enabled or now - self._at < INTERVAL_S:
            return
        stats = snapshot()
        idle = not (stats.num_requests_running or stats.num_requests_waiting)
        prompt, generated, seconds = self._since(stats, now)
        if prompt or generated or not idle:
            _tell(stats, prompt / seconds, generated / seconds)

    def now(self, snapshot: Callable[[], EngineStats]) -> None:
        """Log, whatever ran since the last line."""
        stats = snapshot()
        prompt, generated, seconds = self._since(stats, time.time())
        _tell(stats, prompt / seconds, generated / seconds)

    def _since(self, stats: EngineStats, now: float) -> tuple[int, int, float]:
        """Prompt tokens and new tokens since the last time, and the seconds."""
        prompt = stats.prompt_tokens_total - self._prompt
        generated = stats.generation_tokens_total - self._generated
        seconds = max(now - self._at, 1e-3)
        self._at, self._prompt = now, stats.prompt_tokens_total
        self._generated = stats.generation_tokens_total
        return prompt, generated, seconds


def _tell(stats: EngineStats, prompt_rate: float, generation_rate: float) -> None:
    hits = stats.prefix_cache_hits_total / max(1, stats.prefix_cache_queries_total)
    log.info(
        "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, "
        "waiting: %d, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%, preemptions: %d",
        prompt_rate,
        generation_rate,
        stats.num_requests_running,
        stats.num_requests_waiting,
        100 * stats.kv_cache_usage_perc,
        100 * hits,
        stats.num_preemptions_total,
    )
