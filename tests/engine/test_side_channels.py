"""FAULTS 50: nothing that a tenant can observe depends on what another one has sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.kv_cache.prefix_cache import PrefixMissTracker
from engine.scheduler import Sequence
from tests.engine.helpers import Driver

BLOCKS, SECRETS = 64, 40

#: What a request shows: its flight record, and the tokens that each of its steps computed.
Seen = tuple[dict[str, Any], list[int]]


def secret(number: int) -> list[int]:
    """A prompt of the victim's."""
    rng = random.Random(f"secret {number}")
    return [rng.randrange(1000) for _ in range(rng.randint(9, 40))]


def replica(windows: tuple[int, ...]) -> Driver:
    """One whose cache holds the victim's last prompts, and had to evict the first ones."""
    driver = Driver(BLOCKS, windows=windows, token_budget=16)
    for number in range(SECRETS):
        run(driver, secret(number), "victim")
    return driver


def run(driver: Driver, prompt: list[int], tenant: str) -> Seen:
    """Send a prompt for three tokens and look."""
    sequence = driver.add(prompt, namespace=tenant, tenant=tenant)
    computed = []
    while sequence.num_output_tokens < 3:
        plan = driver.step()
        computed.append(plan.num_scheduled[plan.seq_ids.index(sequence.seq_id)])
    driver.scheduler.finish(sequence, "stop")
    flight = msgspec.to_builtins(sequence.timeline)
    # The hour is the clock's; what the steps cost is the order and the size of the chunks.
    flight["chunks"] = [tokens for _, tokens in flight["chunks"]]
    return flight, computed


@pytest.mark.parametrize("windows", [(), (8,), (0, 8)])
def test_fault_50_a_right_guess_looks_like_a_wrong_one(windows: tuple[int, ...]) -> None:
    guesses: list[Callable[[int], list[int]]] = [
        secret,
        lambda number: [token + 1 for token in secret(number)],
    ]
    seen = []
    for guess in guesses:
        driver = replica(windows)
        initial_num_hit_tokens = driver.scheduler.kv.num_hit_tokens
        probes = [run(driver, guess(number), "attacker") for number in reversed(range(SECRETS))]
        # The public totals, too.
        seen.append((probes, driver.scheduler.kv.num_hit_tokens - initial_num_hit_tokens))
    assert seen[0] == seen[1]
    assert seen[0][1] == 0


def test_fault_50_the_same_guess_in_ones_own_namespace_is_seen() -> None:
    """The measure above can tell a hit: without namespaces it does."""
    driver = replica(())
    victim_outputs, attacker_outputs = (
        run(driver, secret(SECRETS - 1), tenant) for tenant in ("victim", "attacker")
    )
    assert victim_outputs[0]["num_cached_tokens"] > 0
    assert (
        len(victim_outputs[1]) < len(attacker_outputs[1])
        or victim_outputs[1] != attacker_outputs[1]
    )


def test_fault_50_the_memory_of_cold_prompts_is_by_namespace() -> None:
    starts = PrefixMissTracker(block_size=4)
    driver = Driver(BLOCKS)
    reasons = []
    for tenant in ("victim", "attacker", "victim"):
        sequence: Sequence = driver.add(secret(0), namespace=tenant)
        driver.step()
        reasons.append(starts.miss_reason(sequence.token_ids, sequence.block_hashes))
        driver.scheduler.finish(sequence, "stop")
    assert reasons == ["no_shared_prefix", "no_shared_prefix", "evicted"]
