"""Averages and recent rates: the gauges of older dashboards, and the line in the log."""

from __future__ import annotations

import pytest

from engine.contract.replica_state import EngineStats
from engine.core.stats import RateMeter, StatsLogger
from engine.kv_cache import make_coordinator
from engine.kv_cache.kv_cache_config import single_group_config


def test_averages_are_of_the_last_whole_stretch() -> None:
    throughput = RateMeter(now=100.0)

    def rates_at(timestamp: float, prompt: int, generated: int) -> tuple[float, float]:
        stats = EngineStats(prompt_tokens_total=prompt, generation_tokens_total=generated)
        rates = throughput.last_rates(stats, now=timestamp)
        assert rates.prompt_tokens_total == prompt
        return rates.avg_prompt_throughput_toks_per_s, rates.avg_generation_throughput_toks_per_s

    assert rates_at(104.5, 500, 50) == (0.0, 0.0)
    assert rates_at(105.0, 500, 50) == (100.0, 10.0)
    assert rates_at(109.0, 900, 90) == (100.0, 10.0)
    assert rates_at(125.0, 900, 150) == (20.0, 5.0)
    assert rates_at(130.0, 900, 150) == (0.0, 0.0)


def test_the_log_has_a_line_every_five_seconds_with_the_recent_hit_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("engine.core.stats.time.time", lambda: now)
    caplog.set_level("INFO", "engine.core.stats")
    logger, stats = StatsLogger(enabled=True), EngineStats(prefix_cache_hit_rate=0.25)

    now, stats.prompt_tokens_total = 104.9, 400
    logger.log_if_due(lambda: stats)
    assert not caplog.messages
    now, stats.prompt_tokens_total = 105.0, 500
    logger.log_if_due(lambda: stats)
    assert "Prompt throughput: 100.0 tokens/s" in caplog.messages[0]
    assert "prefix cache hit rate: 25.0%" in caplog.messages[0]
    now = 110.0
    logger.log_if_due(lambda: stats)
    assert len(caplog.messages) == 1  # nothing ran


def test_the_hit_rate_is_of_the_last_thousand_lookups() -> None:
    cache = make_coordinator(single_group_config(2), 4, 4)
    assert cache.recent_hit_rate == 0.0
    for _ in range(600):
        cache.record_lookup(10, 0)
    for _ in range(400):
        cache.record_lookup(10, 10)
    assert cache.recent_hit_rate == 0.4
    for _ in range(600):
        cache.record_lookup(10, 5)
    assert cache.recent_hit_rate == 0.7
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (16_000, 7_000)
    cache.reset_lookups()
    assert (cache.recent_hit_rate, cache.num_query_tokens) == (0.0, 0)
