"""A modest tenant's first tokens beside a greedy one, and alone on half of the machine: its share.

python -m tests.inference.bench.at_share [--model FOLDER] [--seconds 30] [--loads 0.3 0.6]
    [--at-once 250]

What `tests/engine/test_ttft_fairness.py` simulates, with real processes: prompts of 20 to 120 and
answers of 10 to 60 tokens. First is found out how many such requests a second the machine serves
when it's full; the modest tenant then sends so much of half of that, at random times. Beside: the
greedy one keeps `--at-once` requests open meanwhile, from a process of its own. Alone: `manage.py
up` has half of the processor's cores, and nobody else is there. Each tells p50 and p99 of the time
to first token, and `greedy_tok_s` how many tokens a second, of prompts and answers, the greedy one
got beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from tests.inference.bench.flood import Flood, Running, flooding
from tests.inference.bench.two_tenants import Pair, ask, pair, prompt, share

PROMPTS, ANSWERS = (20, 120), (10, 60)
#: Until a flood has reached every queue.
SETTLE_S = 5.0


@dataclass
class Seen:
    """Of the modest tenant's requests."""

    first: list[float] = field(default_factory=list)
    refused: int = 0


@dataclass
class LoadResult:
    """Both at once."""

    modest: Seen
    greedy_tok_s: float


def _flood(of: Pair, at_once: int, load: float) -> AbstractAsyncContextManager[Running]:
    """The greedy one's; each load meets other prompts, too."""
    product, seed = of.product, f"greedy {load}"
    return flooding(Flood(product.url, product.model, of.a, at_once, PROMPTS, ANSWERS, seed))


async def capacity(of: Pair, at_once: int, seconds: float) -> float:
    """Requests a second that are served when the machine is full."""
    async with _flood(of, at_once, 0.0) as flood:
        await asyncio.sleep(SETTLE_S)
        initial_counts = await flood.counts()
        await asyncio.sleep(seconds)
        return (await flood.counts()).since(initial_counts).answered / seconds


async def modest(of: Pair, rate: float, seconds: float) -> Seen:
    """So many requests a second, at random times; at each rate other ones, which no cache knows."""
    rng, seen = random.Random(f"modest {rate}"), Seen()
    async with asyncio.TaskGroup() as group:
        after = rng.expovariate(rate)
        while after < seconds:
            group.create_task(_later(of, after, random.Random(rng.getrandbits(64)), seen))
            after += rng.expovariate(rate)
    return seen


async def _later(of: Pair, after: float, rng: random.Random, seen: Seen) -> None:
    await asyncio.sleep(after)
    text, tokens = prompt(rng, rng.randint(*PROMPTS)), rng.randint(*ANSWERS)
    answer = await ask(of.product, of.b, text, tokens)
    if answer.status == 200:
        seen.first.append(answer.first)
    else:
        seen.refused += 1


async def run_beside_flood(
    of: Pair, args: argparse.Namespace
) -> tuple[float, dict[float, LoadResult]]:
    """What the machine serves, and both tenants' requests by load."""
    full = await capacity(of, args.at_once, args.seconds / 2)
    results = {}
    for load in args.loads:
        async with _flood(of, args.at_once, load) as flood:
            await asyncio.sleep(SETTLE_S)
            initial_counts, began = await flood.counts(), time.perf_counter()
            seen = await modest(of, load * full / 2, args.seconds)
            counts = (await flood.counts()).since(initial_counts)
            results[load] = LoadResult(seen, counts.tokens / (time.perf_counter() - began))
    return full, results


async def run_isolated(of: Pair, full: float, args: argparse.Namespace) -> dict[float, Seen]:
    """The same requests with nobody beside them."""
    await modest(of, 5.0, 2.0)  # the first ones wait for what is made once
    return {load: await modest(of, load * full / 2, args.seconds) for load in args.loads}


@contextlib.contextmanager
def half_of_the_cores() -> Iterator[None]:
    """For processes that are started in this block."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(cores)[: len(cores) // 2]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="in the place of the demo's")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--at-once", type=int, default=250)
    args = parser.parse_args()
    flags = () if args.model is None else ("--model", args.model)
    with pair(*flags) as of:
        full, results = asyncio.run(run_beside_flood(of, args))
    with contextlib.ExitStack() as stack:
        with half_of_the_cores():
            of = stack.enter_context(pair(*flags))
        isolated_results = asyncio.run(run_isolated(of, full, args))
    for load in args.loads:
        row: dict[str, float] = {"capacity": round(full, 1), "load": load}
        row["greedy_tok_s"] = round(results[load].greedy_tok_s)
        for name, seen in (("beside", results[load].modest), ("alone", isolated_results[load])):
            row |= {f"{name}_requests": len(seen.first), f"{name}_refused": seen.refused}
            row |= {f"{name}_ms_{q}": share(seen.first, q / 100) for q in (50, 99)}
        for q in (50, 99):
            row[f"ratio_{q}"] = round(
                share(results[load].modest.first, q / 100)
                / share(isolated_results[load].first, q / 100),
                2,
            )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
