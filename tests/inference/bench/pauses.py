"""How long streams pause when their replica is killed, or frozen by a signal.

python -m tests.inference.bench.pauses [--kills 8] [--freezes 2] [--streams 4]

`manage.py up` of the demo with one replica, with two, and with one and a spare. While so many
streams run, the replica that has the most of them is killed; shown is the longest pause of a kill's
streams (median and most over the kills), and how long a replica took to start meanwhile. With two
replicas one is frozen too: how long it was there, and the pause.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

from config.connections import socket_url
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import Heartbeat
from tests.e2e.product import Product, running

SETUPS = {"one": (1,), "two": (2,), "one and a spare": (1, "--spares", "1")}
TOKENS, START_DELAY_S, HEALTHY_S, LIMIT_S, POLL_S = 1900, 0.7, 11.0, 60.0, 0.02


def beats(product: Product) -> list[Heartbeat]:
    """Of the replicas that are ready."""
    with redis.Redis.from_url(socket_url(product.data_dir)) as client:
        names = client.smembers(redis_keys.replicas_key())
        responses = [client.get(redis_keys.replica_key(name.decode())) for name in names]
    heartbeats = [protocol.decode_heartbeat(data) for data in responses if data]
    return [beat for beat in heartbeats if beat.state == "ready" and lives(beat.pid)]


def lives(pid: int) -> bool:
    """Whether there's such a process, and not only what its parent hasn't looked at yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


async def stream(product: Product, seed: int) -> list[float]:
    """When each piece of one came."""
    url = urlsplit(product.url)
    body = json.dumps(
        {"model": product.model, "prompt": f"A story, number {seed}:", "max_tokens": TOKENS}
        | {"stream": True, "ignore_eos": True}
    ).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {product.api_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    times, last = [], b""
    while data := await reader.read(1 << 16):
        times.append(time.perf_counter())
        last = data
    writer.close()
    if b"[DONE]" not in last:
        raise RuntimeError(f"a stream ended with {last[-300:]!r}")
    return times


async def until_gone(pid: int) -> float:
    """Seconds until there's no such process."""
    began = time.perf_counter()
    for _ in range(int(LIMIT_S / POLL_S)):
        if not lives(pid):
            return time.perf_counter() - began
        await asyncio.sleep(POLL_S)
    raise RuntimeError(f"process {pid} didn't go")


async def harm(
    product: Product, rng: random.Random, args: argparse.Namespace, number: signal.Signals
) -> tuple[float, float]:
    """Signal one; seconds of the longest pause that followed, and until it was gone."""
    streams = [
        asyncio.create_task(stream(product, rng.getrandbits(30))) for _ in range(args.streams)
    ]
    await asyncio.sleep(START_DELAY_S)
    busiest = max(beats(product), key=lambda beat: beat.stats.num_requests_running)
    cut_at = time.perf_counter()
    os.kill(busiest.pid, number)
    gone = await until_gone(busiest.pid)
    stream_times = await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
    pauses = [
        after - initial
        for times in stream_times
        for initial, after in itertools.pairwise(times)
        if after > cut_at
    ]
    return max(pauses), gone


async def run_streams(product: Product, count: int) -> float:
    """Seconds until so many are ready."""
    began = time.perf_counter()
    while len(beats(product)) < count:
        await asyncio.sleep(0.02)
        if time.perf_counter() - began > LIMIT_S:
            raise RuntimeError("the replica didn't come back")
    return time.perf_counter() - began


async def measure(product: Product, setup: str, args: argparse.Namespace) -> dict[str, Any]:
    """One line."""
    rng, count = random.Random(1), len(beats(product))
    row: dict[str, Any] = {"replicas": setup}
    freezes = args.freezes if setup == "two" else 0
    for what, times in (("kill", args.kills), ("freeze", freezes)):
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        result = []
        for _ in range(times):
            await asyncio.sleep(HEALTHY_S)  # one that dies earlier waits before it starts again
            result.append(await harm(product, rng, args, number))
            await run_streams(product, count)
        if result:
            pauses, gone = zip(*result, strict=True)
            row[f"{what}s"] = times
            row[f"{what}_pause_s_median"] = round(statistics.median(pauses), 2)
            row[f"{what}_pause_s_most"] = round(max(pauses), 2)
            row[f"{what}_gone_s_most"] = round(max(gone), 2)
    return row


async def start_s(product: Product) -> float:
    """Seconds from the death of the only replica until another is ready."""
    await asyncio.sleep(HEALTHY_S)
    pid = beats(product)[0].pid
    os.kill(pid, signal.SIGKILL)
    return await run_streams(product, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--freezes", type=int, default=2)
    parser.add_argument("--streams", type=int, default=4)
    args = parser.parse_args()
    for setup, (count, *more) in SETUPS.items():
        with (
            tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
            running(Path(folder), "--replicas", str(count), *map(str, more)) as product,
        ):
            row = asyncio.run(measure(product, setup, args))
            if setup == "one":
                starts = [asyncio.run(start_s(product)) for _ in range(2)]
                row["start_s_median"] = round(statistics.median(starts), 2)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
