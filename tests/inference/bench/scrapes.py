"""Gaps between a stream's tokens while Prometheus reads `/metrics`, and without it, in turns.

python -m tests.inference.bench.scrapes [--rate 10] [--streams 4] [--rounds 5] [--tokens 200]

A real replica of the demo model; who scrapes is a process of its own. Prints each turn's gaps and
the median over the turns of the ratio of their p99.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.http_load import Target, closed_loop
from benchmarks.statistics import percentile
from benchmarks.workload import random_jobs
from tests.inference import live
from tests.inference.bench import ROOT

TOKEN = "4d8f" * 8
SPAWN = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def scrapes(port: int, rate: float) -> Iterator[None]:
    """Read `/metrics` `rate` times a second while the block runs; 0: never."""
    if not rate:
        yield
        return
    started, finished_event = SPAWN.Event(), SPAWN.Event()
    scraper = SPAWN.Process(target=_scrape, args=(port, rate, started, finished_event), daemon=True)
    scraper.start()
    if not started.wait(60):
        raise RuntimeError("Nothing could be scraped; its process says why.")
    try:
        yield
    finally:
        finished_event.set()
        scraper.join()


def _scrape(port: int, rate: float, started: Event, finished: Event) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    count, size, due = 0, 0, time.monotonic()
    while not finished.wait(max(0.0, due - time.monotonic())):
        with urllib.request.urlopen(request, timeout=10) as answer:
            size = len(answer.read())
        count, due = count + 1, due + 1 / rate
        started.set()
    print(f"{count} scrapes of {size:,} bytes", file=sys.stderr)


async def gaps_p99_ms(target: Target, args: argparse.Namespace) -> float:
    """Of one turn. Raises `RuntimeError` for requests that fail."""
    lengths = (args.tokens, args.tokens)
    jobs = random_jobs(args.streams * args.answers, 400, (8, 32), lengths)
    results = await closed_loop(target, jobs, args.streams)
    if results.failures:
        raise RuntimeError(results.failures[0])
    return 1000 * percentile([gap for sample in results.samples for gap in sample.gaps], 99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="scrapes a second")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--answers", type=int, default=4, help="of each stream, in a turn")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
    ):
        of.environment["QUIRE_METRICS_TOKEN"] = TOKEN
        replica = [sys.executable, "-m", "engine.serving", "--replica-id=r1"]
        replica += [f"--redis-url={of.redis_url}", f"--model={ROOT / 'demo' / 'model'}"]
        replica += ["--served-model-name=m", "--max-model-len=512"]
        with live.process(replica, of.environment), live.gateway(of, "uvicorn") as (port, _):
            target = Target(urlsplit(f"http://127.0.0.1:{port}"), "m", of.key)
            asyncio.run(gaps_p99_ms(target, args))
            ratios = []
            for _ in range(args.rounds):
                turn = {}
                for rate in (0.0, args.rate):
                    with scrapes(port, rate):
                        turn[rate] = asyncio.run(gaps_p99_ms(target, args))
                ratios.append(turn[args.rate] / turn[0.0])
                print(json.dumps({"p99_ms": turn, "ratio": ratios[-1]}), flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
