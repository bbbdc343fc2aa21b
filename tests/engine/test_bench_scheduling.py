"""The scheduling benchmark runs, and its scheduler does what it says."""

from __future__ import annotations

from benchmarks.scheduling import make_scheduler, prefix_cache, queue, sequence, step


def test_the_queue_benchmark_counts_its_steps() -> None:
    row = queue(running=4, waiting=20, tenants=3, steps=3)
    assert (row["waiting"], row["steps"]) == (20, 3)
    assert row["step_p50_us"] > 0


def test_the_cache_benchmark_hits_nothing() -> None:
    row = prefix_cache(num_prompts=3, input_len=40, repeats=1)
    assert row["with_us_per_token"] > 0
    scheduler = make_scheduler(64, 512, 8, caching=True)
    for index in range(3):
        scheduler.add(sequence(index, list(range(index * 50, index * 50 + 40)), "t"))
    assert len(step(scheduler)) == 3
    assert scheduler.kv.num_hit_tokens == 0
