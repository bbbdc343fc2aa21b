"""Goodput beyond what the seats take: tokens of answers that came whole, at 1, 5 and 20 times.

python -m tests.inference.bench.overload [--seconds 20] [--seats 32] [--turns 2]

`manage.py up` of the demo; so many clients at a time ask for short answers again and again, each
over a new connection, and come back when they are told to. Levels are taken in turns, up and down;
counted is what came between the moment that a level has settled and its end, and the processor time
of gateway, engine and clients meanwhile: all of them share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.inference.bench.two_tenants import ask, prompt, share

from chaos.instance import MARKS  # isort: skip
from chaos.instance import children  # isort: skip
from chaos.instance import command_line  # isort: skip
from tests.e2e.product import Product, running  # isort: skip

#: Times of the seats.
LEVELS = (1, 5, 20)
#: Until a level's queue is what it stays, and nothing of the last one runs.
SETTLE_S, PAUSE_S = 5.0, 3.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Level:
    """What came of one level."""

    tokens: int = 0
    answered: int = 0
    waits: list[float] = field(default_factory=list)
    failed: int = 0

    def clear(self) -> None:
        """Begin to count."""
        self.tokens = self.answered = self.failed = 0
        self.waits = []


async def client(product: Product, level: Level, rng: random.Random) -> None:
    """Asks until it's cancelled."""
    while True:
        tokens = rng.randint(16, 32)
        seen = await ask(product, product.api_key, prompt(rng, rng.randint(16, 32)), tokens)
        if seen.status == 200:
            level.answered += 1
            level.tokens += seen.usage.get("completion_tokens", 0)
            continue
        level.failed += seen.status not in (429, 503)
        level.waits.append(seen.retry_after)
        await asyncio.sleep(seen.retry_after)


async def measure(product: Product, count: int, seconds: float, seed: int) -> dict[str, float]:
    """One level for so long."""
    level, rng = Level(), random.Random(seed)
    busy = [
        asyncio.create_task(client(product, level, random.Random(rng.getrandbits(64))))
        for _ in range(count)
    ]
    await asyncio.sleep(SETTLE_S)
    level.clear()
    initial, began = dict(spent(product)), time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    cpu = {name: round((of - initial[name]) / took, 2) for name, of in spent(product)}
    measurements = {
        "clients": count,
        "tok_s": round(level.tokens / took, 1),
        "answered_s": round(level.answered / took, 1),
        "refused_s": round(len(level.waits) / took, 1),
        "told_ms_p50": share(level.waits, 0.5) if level.waits else 0.0,
        "told_ms_p99": share(level.waits, 0.99) if level.waits else 0.0,
        "failed": level.failed,
        **{f"{name}_cores": value for name, value in cpu.items()},
        # The clients share the machine: what is left to the product is made so much of.
        "tok_per_core_s": round(level.tokens / took / (cpu["gateway"] + cpu["replica"])),
    }
    for task in busy:
        task.cancel()
    for task in busy:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return measurements


def spent(product: Product) -> Iterator[tuple[str, float]]:
    """Seconds of processor time so far, of whom."""
    for name in ("gateway", "replica"):
        mark = MARKS[name].encode()
        pids = [pid for pid in children(product.process.pid) if mark in command_line(pid)]
        yield name, sum(map(_seconds, pids))
    local_usage = resource.getrusage(resource.RUSAGE_SELF)
    yield "clients", local_usage.ru_utime + local_usage.ru_stime


def _seconds(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(stat[11]) + int(stat[12])) / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    rates: dict[int, list[float]] = {times: [] for times in LEVELS}
    per_core: dict[int, list[float]] = {times: [] for times in LEVELS}
    flags = ("--no-worker", "--max-num-seqs", str(args.seats))
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        running(Path(folder), *flags) as product,
    ):
        for turn in range(args.turns):
            for times in LEVELS if turn % 2 == 0 else reversed(LEVELS):
                row = asyncio.run(measure(product, times * args.seats, args.seconds, turn))
                rates[times].append(row["tok_s"])
                per_core[times].append(row["tok_per_core_s"])
                print(json.dumps(row), flush=True)
                time.sleep(PAUSE_S)
    for name, rates_by_load in (
        ("tok/s", rates),
        ("tok/s a core of gateway and replica", per_core),
    ):
        medians = {
            times: statistics.median(load_rates) for times, load_rates in rates_by_load.items()
        }
        peak = max(medians.values())
        summary = ", ".join(f"{times}x {rate / peak:.3f}" for times, rate in medians.items())
        print(f"# of the peak of {peak:.0f} {name}: {summary}")


if __name__ == "__main__":
    main()
