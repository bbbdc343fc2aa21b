"""One tenant's first tokens, alone and beside another one that floods the same replica.

python -m tests.inference.bench.neighbour [--at-once 250] [--seconds 60] [--per-second 1]

A keeps `at-once` requests open, from a process of its own: long prompts, long answers or both. B
sends a short request so many times a second. Shown is B's time to first token alone and beside each
flood, the replica's steps meanwhile, and what B may take: its own time (p99 alone) and two steps
(p99 beside). Then where B's time went, by the records of its requests: into the gateway, through it
to a replica, in the replica's queue, in steps until the first token, and on Redis's ways there and
back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sqlite3
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from tests.inference.bench.flood import Flood, flooding
from tests.inference.bench.two_tenants import Pair, ask, pair, prompt, redis_url, share

#: What A sends: tokens of a prompt and of an answer.
FLOODS = {"prompts": (1650, 1), "decodes": (16, 200), "both": (1650, 200)}
SHORT, ANSWER = 16, 8
#: Until a flood has reached every queue; a heartbeat tells of a step twice a second.
SETTLE_S, LOOK_S = 5.0, 0.25


@dataclass
class Found:
    """B's times to first token, and the lengths of steps, in seconds."""

    first: list[float] = field(default_factory=list)
    ids: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    refused: int = 0
    answered: int = 0
    told_later: int = 0
    tokens_s: float = 0.0


async def steps(of: Pair, found: Found) -> None:
    """How long the replica's steps take, as its heartbeats tell."""
    async with redis.Redis.from_url(redis_url(of)) as client:
        while True:
            for name in await client.smembers(redis_keys.replicas_key()):
                data = await client.get(redis_keys.replica_key(name.decode()))
                if data is not None:
                    beat = protocol.decode_heartbeat(data)
                    found.steps.append(beat.stats.last_step_ms / 1000)
            await asyncio.sleep(LOOK_S)


async def beside(of: Pair, kind: str | None, args: argparse.Namespace) -> Found:
    """B's requests, evenly over the time, and A's meanwhile."""
    found = Found()
    watching = asyncio.create_task(steps(of, found))
    if kind is None:
        await short_ones(of, kind, args, found)
    else:
        tokens, answer = FLOODS[kind]
        what = Flood(
            *(of.product.url, of.product.model, of.a, args.at_once),
            *((tokens, tokens), (answer, answer), f"{args.seed} {kind}"),
        )
        async with flooding(what) as flood:
            await asyncio.sleep(SETTLE_S)
            found.steps.clear()
            before, began = await flood.counts(), time.monotonic()
            await short_ones(of, kind, args, found)
            counts = (await flood.counts()).since(before)
            found.answered, found.told_later = counts.answered, counts.refused
            found.tokens_s = counts.tokens / (time.monotonic() - began)
    await _end([watching])
    return found


async def short_ones(of: Pair, kind: str | None, args: argparse.Namespace, found: Found) -> None:
    """B's requests; beside each flood other ones, which no cache knows."""
    rng = random.Random(f"{args.seed} {kind}")

    async def short(after: float) -> None:
        await asyncio.sleep(after)
        seen = await ask(of.product, of.b, prompt(rng, SHORT), ANSWER)
        if seen.status == 200:
            found.first.append(seen.first)
            found.ids[seen.request_id] = 1000 * seen.first
        else:
            found.refused += 1

    began = time.monotonic()
    count = int(args.seconds * args.per_second)
    await asyncio.gather(*(short(number / args.per_second) for number in range(count)))
    took = time.monotonic() - began
    if took > 2 * args.seconds:
        print(f"# B's last answer came {took - args.seconds:.0f} s after its last request")


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Again where one goes on: a client of Redis may take a cancellation for its own."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=1.0)


def stages(of: Pair, found: Found) -> dict[str, Any]:
    """Milliseconds of B's requests in each stage, median and p99, by their records."""
    path = of.product.data_dir / "quire.sqlite3"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT header_id, detail FROM metering_requestentry").fetchall()
    split: dict[str, list[float]] = {}
    for header_id, detail in rows:
        if header_id in found.ids:
            for stage, spent in _split(json.loads(detail), found.ids[header_id]).items():
                split.setdefault(stage, []).append(spent / 1000)
    return {stage: [share(spent, 0.5), share(spent, 0.99)] for stage, spent in split.items()}


def _split(note: dict[str, Any], client_ms: float) -> dict[str, float]:
    """One request's time to first token, which its client saw."""
    output, first = note["outputs"][0], float(note["tokens"][0][0])
    placed = note["hops"][0]["at_ms"]
    queue, steps = output.get("queue_ms", 0.0), output.get("prefill_ms", 0.0)
    return {
        "outside": client_ms - first,
        "admission": note["admitted_ms"],
        "to_replica": placed - note["admitted_ms"],
        "queue": queue,
        "steps": steps,
        "ways": first - placed - queue - steps,
        "ahead": float(output.get("ahead", 0)),
    }


async def measure(of: Pair, args: argparse.Namespace) -> None:
    """One line of JSON a flood."""
    alone = 0.0
    for kind in (None, *FLOODS):
        found = await beside(of, kind, args)
        own = share(found.first, 0.99)
        row: dict[str, object] = {"beside": kind or "nothing", "requests": len(found.first)}
        row |= {"refused": found.refused, "ttft_ms_p50": share(found.first, 0.5)}
        row |= {"ttft_ms_p99": own, "ttft_ms_most": share(found.first, 1.0)}
        row |= {"step_ms_p50": share(found.steps, 0.5), "step_ms_p99": share(found.steps, 0.99)}
        if kind is None:
            alone = own
        else:
            row["allowed_ms"] = round(alone + 2 * share(found.steps, 0.99), 1)
            row |= {"flood_answered": found.answered, "flood_told_later": found.told_later}
            row["flood_tok_s"] = round(found.tokens_s)
        print(json.dumps(row), flush=True)
        await asyncio.sleep(SETTLE_S)
        print(json.dumps(stages(of, found)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--per-second", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with pair() as of:
        asyncio.run(measure(of, args))


if __name__ == "__main__":
    main()
