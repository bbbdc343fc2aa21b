"""The averages of tokens a second that dashboards of older releases ask for."""

from __future__ import annotations

from engine.contract.replica_state import EngineStats
from engine.core.stats import RateMeter


def test_averages_are_of_the_last_whole_stretch() -> None:
    throughput = RateMeter(now=100.0)

    def told(at: float, prompt: int, generated: int) -> tuple[float, float]:
        stats = EngineStats(prompt_tokens_total=prompt, generation_tokens_total=generated)
        found = throughput.last_rates(stats, now=at)
        assert found.prompt_tokens_total == prompt
        return found.avg_prompt_throughput_toks_per_s, found.avg_generation_throughput_toks_per_s

    assert told(109.5, 500, 50) == (0.0, 0.0)
    assert told(110.0, 500, 50) == (50.0, 5.0)
    assert told(115.0, 900, 90) == (50.0, 5.0)
    assert told(130.0, 900, 150) == (20.0, 5.0)
    assert told(140.0, 900, 150) == (0.0, 0.0)
