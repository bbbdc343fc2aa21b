"""`Throughput`: tokens a second of late, for the gauges that vLLM had of them."""

from __future__ import annotations

import time

import msgspec

from engine.contract.replica_state import EngineStats

INTERVAL_S = 10.0


class Throughput:
    """Averages over stretches of `INTERVAL_S`: what is told is that of the last whole one."""

    def __init__(self, now: float | None = None) -> None:
        self._at = time.monotonic() if now is None else now
        self._prompt = self._generated = 0
        self._rates = (0.0, 0.0)

    def told(self, stats: EngineStats, now: float | None = None) -> EngineStats:
        """The same figures with the averages."""
        now = time.monotonic() if now is None else now
        if (seconds := now - self._at) >= INTERVAL_S:
            prompt = stats.prompt_tokens_total - self._prompt
            generated = stats.generation_tokens_total - self._generated
            self._rates = (prompt / seconds, generated / seconds)
            self._at, self._prompt = now, stats.prompt_tokens_total
            self._generated = stats.generation_tokens_total
        prompt_rate, generation_rate = self._rates
        return msgspec.structs.replace(
            stats,
            avg_prompt_throughput_toks_per_s=prompt_rate,
            avg_generation_throughput_toks_per_s=generation_rate,
        )
