"""Can one tenant tell by the clock what another one has asked?

python -m tests.inference.bench.guesses [--pairs 400] [--tokens 1200]

A asks secrets. B then asks, in random order and one at a time, for prompts of the same length that
A has asked (they lie in the prefix cache) and for such that nobody has. Shown are the times to
first token of both kinds and how often B would be right if it called the faster half of each pair
a hit; 50 % is a coin. The same is then done with B's own prompts: that difference must be seen, or
the measurement is blind. Exits 1 where B can tell (p < 0.001), or where it's blind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from dataclasses import dataclass, field
from typing import Any

from tests.inference.bench.two_tenants import Pair, ask, pair, prompt, share

#: Of the sign test. Pairs of B's own, and how many prompts are asked before they are guessed.
ALPHA, NUM_OWN_PAIRS, AT_A_TIME = 0.001, 40, 10
#: A pair: the prompt that somebody has asked for, and one like it.
Guess = tuple[str, str]


def chance(right: int, count: int) -> float:
    """How likely a coin is at least as far from half right: the two-sided sign test."""
    far = abs(right - count / 2)
    combinations = [math.comb(count, n) for n in range(count + 1) if abs(n - count / 2) >= far]
    return min(1.0, sum(combinations) / 2**count)


@dataclass
class Guesses:
    """Times to first token of prompts that were asked before and of others, pair by pair."""

    asked: list[float] = field(default_factory=list)
    never: list[float] = field(default_factory=list)
    cached: int = 0

    @property
    def right(self) -> int:
        """How often the faster one was the one that was asked before."""
        return sum(hit < miss for hit, miss in zip(self.asked, self.never, strict=True))

    @property
    def is_distinguishable(self) -> bool:
        """Whether B knows more than a coin."""
        return chance(self.right, len(self.asked)) < ALPHA or self.cached > 0

    def row(self) -> dict[str, Any]:
        """For a reader."""
        return {
            "pairs": len(self.asked),
            "asked_before_ms_p50": share(self.asked, 0.5),
            "never_asked_ms_p50": share(self.never, 0.5),
            "right": round(self.right / len(self.asked), 3),
            "p": round(chance(self.right, len(self.asked)), 5),
            "cached_tokens": self.cached,
        }


async def teach(of: Pair, key: str, guesses: list[Guess]) -> None:
    """Ask for the first of each pair: it's cached then."""
    for cached, _ in guesses:
        seen = await ask(of.product, key, cached, 1)
        if seen.status != 200:
            sys.exit(f"a prompt was answered with {seen.status}")


async def guess(of: Pair, guesses: list[Guess], rng: random.Random, results: Guesses) -> None:
    """B's times for both of each pair, in random order."""
    for both in guesses:
        times = [0.0, 0.0]
        for index in rng.sample((0, 1), 2):
            seen = await ask(of.product, of.b, both[index], 1)
            times[index] = seen.first
            details = seen.usage.get("prompt_tokens_details") or {}
            results.cached += details.get("cached_tokens") or 0
        results.asked.append(times[0])
        results.never.append(times[1])


async def measure(of: Pair, args: argparse.Namespace) -> bool:
    """Whether B can't tell of A's prompts, and can of its own."""
    rng, good = random.Random(args.seed), True
    for whose, key, count in (("another's", of.a, args.pairs), ("its own", of.b, NUM_OWN_PAIRS)):
        results = Guesses()
        # Few at a time: what was asked long ago might be evicted, and would prove nothing.
        for index in range(0, count, AT_A_TIME):
            size = min(AT_A_TIME, count - index)
            guesses = [(prompt(rng, args.tokens), prompt(rng, args.tokens)) for _ in range(size)]
            await teach(of, key, guesses)
            await guess(of, guesses, rng, results)
        print(json.dumps({"whose": whose} | results.row()), flush=True)
        good &= results.is_distinguishable == (whose == "its own")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with pair() as of:
        sys.exit(0 if asyncio.run(measure(of, args)) else 1)


if __name__ == "__main__":
    main()
