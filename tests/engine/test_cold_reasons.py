"""The flight record says why a prompt found nothing in the cache."""

from __future__ import annotations

import pytest

from engine.kv_cache.prefix_cache import PrefixMissTracker
from tests.engine.helpers import Driver

PROMPT = list(range(100, 112))


def reason(driver: Driver, prompt: list[int], namespace: str = "", end: bool = True) -> str:
    """Why the prompt was cold, run to its first token."""
    sequence = driver.add(prompt, namespace=namespace)
    driver.step()
    if end:
        driver.scheduler.finish(sequence, "stop")
    return sequence.timeline.cold_reason


@pytest.mark.parametrize("windows", [(), (8,), (0, 8)])
def test_each_reason_in_turn(windows: tuple[int, ...]) -> None:
    driver = Driver(num_blocks=8, windows=windows)
    assert reason(driver, PROMPT, "a") == "no_shared_prefix"
    assert reason(driver, PROMPT, "a") == ""
    assert reason(driver, PROMPT, "b") == "no_shared_prefix"
    assert reason(driver, PROMPT[:4], "b") == "shorter_than_a_block"
    for start in range(5):
        assert (
            reason(driver, list(range(1000 + start * 50, 1012 + start * 50)), "c")
            == "no_shared_prefix"
        )
    assert reason(driver, PROMPT, "a") == "evicted"


def test_without_a_cache_the_reason_is_the_switch() -> None:
    driver = Driver(num_blocks=8, enable_prefix_caching=False)
    assert reason(driver, PROMPT) == "caching_off"


def test_prompt_logprobs_need_all_tokens() -> None:
    driver = Driver(num_blocks=8)
    sequence = driver.add(PROMPT)
    sequence.prompt_logprobs = [None]
    driver.step()
    assert sequence.timeline.cold_reason == "all_tokens_needed"


def test_a_preempted_sequence_keeps_the_reason_of_its_first_start() -> None:
    driver = Driver(num_blocks=4)
    driver.add(PROMPT[:7])
    young = driver.add(list(range(7)))
    for _ in range(3):
        driver.step()
    assert young.timeline.num_preemptions == 1
    driver.scheduler.finish(driver.scheduler.running[0], "stop")
    driver.step()
    assert young.timeline.cold_reason == "no_shared_prefix"


def test_memory_is_bounded_and_what_is_forgotten_counts_as_never_shared() -> None:
    driver = Driver(num_blocks=4)
    starts = PrefixMissTracker(block_size=4, remembered=3)
    driver.scheduler.kv._prefix_misses = starts
    for start in range(50):
        assert reason(driver, list(range(start * 20, start * 20 + 12))) == "no_shared_prefix"
    assert len(starts._hashes) == 3
    assert reason(driver, list(range(12))) == "no_shared_prefix"
    assert reason(driver, list(range(48 * 20, 48 * 20 + 12))) == "evicted"
