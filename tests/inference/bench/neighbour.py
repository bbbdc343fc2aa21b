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
SETTLE_S, POLL_S = 5.0, 0.25


@dataclass
class Measurements:
    """B's times to first token, and the lengths of steps, in seconds."""

    first: list[float] = field(default_factory=list)
    ids: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    refused: int = 0
    answered: int = 0
    num_rejected: int = 0
    tokens_s: float = 0.0


async def steps(of: Pair, measured: Measurements) -> None:
    """How long the replica's steps take, as its heartbeats tell."""
    async with redis.Redis.from_url(redis_url(of)) as client:
        while True:
            for name in await client.smembers(redis_keys.replicas_key()):
                data = await client.get(redis_keys.replica_key(name.decode()))
                if data is not None:
                    beat = protocol.decode_heartbeat(data)
                    measured.steps.append(beat.stats.last_step_ms / 1000)
            await asyncio.sleep(POLL_S)


async def run_with_neighbour(of: Pair, kind: str | None, args: argparse.Namespace) -> Measurements:
    """B's requests, evenly over the time, and A's meanwhile."""
    measured = Measurements()
    watching = asyncio.create_task(steps(of, measured))
    if kind is None:
        await short_ones(of, kind, args, measured)
    else:
        tokens, answer = FLOODS[kind]
        what = Flood(
            *(of.product.url, of.product.model, of.a, args.at_once),
            *((tokens, tokens), (answer, answer), f"{args.seed} {kind}"),
        )
        async with flooding(what) as flood:
            await asyncio.sleep(SETTLE_S)
            measured.steps.clear()
            initial_counts, began = await flood.counts(), time.monotonic()
            await short_ones(of, kind, args, measured)
            counts = (await flood.counts()).since(initial_counts)
            measured.answered, measured.num_rejected = counts.answered, counts.refused
            measured.tokens_s = counts.tokens / (time.monotonic() - began)
    await _end([watching])
    return measured


async def short_ones(
    of: Pair, kind: str | None, args: argparse.Namespace, measured: Measurements
) -> None:
    """B's requests; beside each flood other ones, which no cache knows."""
    rng = random.Random(f"{args.seed} {kind}")

    async def short(after: float) -> None:
        await asyncio.sleep(after)
        seen = await ask(of.product, of.b, prompt(rng, SHORT), ANSWER)
        if seen.status == 200:
            measured.first.append(seen.first)
            measured.ids[seen.request_id] = 1000 * seen.first
        else:
            measured.refused += 1

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


def stages(of: Pair, measured: Measurements) -> dict[str, Any]:
    """Milliseconds of B's requests in each stage, median and p99, by their records."""
    path = of.product.data_dir / "quire.sqlite3"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT header_id, detail FROM metering_requestentry").fetchall()
    split: dict[str, list[float]] = {}
    for header_id, detail in rows:
        if header_id in measured.ids:
            for stage, spent in _split(json.loads(detail), measured.ids[header_id]).items():
                split.setdefault(stage, []).append(spent / 1000)
    return {stage: [share(spent, 0.5), share(spent, 0.99)] for stage, spent in split.items()}


def _split(trace: dict[str, Any], client_ms: float) -> dict[str, float]:
    """One request's time to first token, which its client saw."""
    output, first = trace["outputs"][0], float(trace["tokens"][0][0])
    placed = trace["hops"][0]["at_ms"]
    queue, steps = output.get("queue_ms", 0.0), output.get("prefill_ms", 0.0)
    return {
        "outside": client_ms - first,
        "admission": trace["admitted_ms"],
        "to_replica": placed - trace["admitted_ms"],
        "queue": queue,
        "steps": steps,
        "ways": first - placed - queue - steps,
        "ahead": float(output.get("ahead", 0)),
    }


async def measure(of: Pair, args: argparse.Namespace) -> None:
    """One line of JSON a flood."""
    isolated = 0.0
    for kind in (None, *FLOODS):
        measured = await run_with_neighbour(of, kind, args)
        p99 = share(measured.first, 0.99)
        row: dict[str, object] = {"beside": kind or "nothing", "requests": len(measured.first)}
        row |= {"refused": measured.refused, "ttft_ms_p50": share(measured.first, 0.5)}
        row |= {"ttft_ms_p99": p99, "ttft_ms_most": share(measured.first, 1.0)}
        row |= {
            "step_ms_p50": share(measured.steps, 0.5),
            "step_ms_p99": share(measured.steps, 0.99),
        }
        if kind is None:
            isolated = p99
        else:
            row["allowed_ms"] = round(isolated + 2 * share(measured.steps, 0.99), 1)
            row |= {"flood_answered": measured.answered, "flood_told_later": measured.num_rejected}
            row["flood_tok_s"] = round(measured.tokens_s)
        print(json.dumps(row), flush=True)
        await asyncio.sleep(SETTLE_S)
        print(json.dumps(stages(of, measured)), flush=True)


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
