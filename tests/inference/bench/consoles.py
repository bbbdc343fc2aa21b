"""What the gateway adds to the time to the first token, without and with open consoles, in turns.

python -m tests.inference.bench.consoles [--rate 200] [--consoles 1] [--rounds 3] [--tokens 1]

A console is an operator's overview and KV map (10,000 blocks, of which 200 change ten times a
second), over their two sockets. Who tells of the blocks and who reads the sockets are processes of
their own, as replicas and browsers are. Both ways are told beside a client that asks the replica
through Redis itself at the same rate ("raw"): what the gateway adds is the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import redis
from websockets.asyncio.client import ClientConnection, connect

from engine.contract.replica_state import (
    KVMapBlock,
    KVMapFrame,
    TenantBlocks,
    frames_key,
    watch_key,
)
from tests.inference import live
from tests.inference.bench import ROOT
from tests.inference.bench.__main__ import cpu_seconds
from tests.inference.bench.load import Target, Timings, percentile, run_level
from tests.inference.bench.raw_client import run_raw_level

BLOCKS, CHANGES, FRAME_S = 10_000, 200, 0.1
SPAWN = multiprocessing.get_context("spawn")
#: Until a page that opened has all blocks.
OPENING_S = 2.0
SESSION = """
import django
django.setup()
from importlib import import_module
from django.conf import settings
from django.test import Client
from tenants.models import User
root = User.objects.create_superuser("root", "root@example.org", "a quiet page of ink")
client = Client()
client.force_login(root)
print(f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}")
"""


@contextlib.contextmanager
def blocks(url: str, replica_id: str) -> Iterator[None]:
    """A replica's block map, told while somebody looks."""
    finished_event = SPAWN.Event()
    teller = SPAWN.Process(target=_tell, args=(url, replica_id, finished_event), daemon=True)
    teller.start()
    try:
        yield
    finally:
        finished_event.set()
        teller.join()


def _tell(url: str, replica_id: str, finished: Event) -> None:
    client = redis.Redis.from_url(url)
    asked, number, run = None, 0, 0
    while not finished.wait(FRAME_S):
        now = client.get(watch_key(replica_id))
        if now is None:
            asked = None
            continue
        full = now != asked
        asked, number, run = now, 1 if full else number + 1, run + full
        changed = range(BLOCKS) if full else random.sample(range(BLOCKS), CHANGES)
        frame = KVMapFrame(
            replica_id=replica_id,
            incarnation="1",
            number=number,
            run=run,
            at=time.time(),
            num_blocks=BLOCKS,
            block_size=16,
            num_free=BLOCKS // 2,
            num_cached=BLOCKS // 4,
            whole=full,
            tenants=[TenantBlocks("live", BLOCKS // 2, 0, 0, BLOCKS, 8, 0)],
            words=["live", *(f"req-{number}" for number in range(16)), ""],
            blocks=[
                KVMapBlock(block_id, 1, block_id % 2 == 0, 0, [1 + random.randrange(16)], 17)
                for block_id in changed
            ],
        )
        client.publish(frames_key(replica_id), msgspec.msgpack.encode(frame))


@contextlib.asynccontextmanager
async def consoles(port: int, cookie: str, replica_id: str, count: int) -> AsyncIterator[list[int]]:
    """So many open pages, until the block ends; then how many frames each kind of socket got."""
    got = [0, 0]
    if not count:
        yield got
        return
    finished_event, client = SPAWN.Event(), SPAWN.SimpleQueue()
    args = (port, cookie, replica_id, count, finished_event, client)
    reader = SPAWN.Process(target=_read, args=args, daemon=True)
    reader.start()
    try:
        await asyncio.to_thread(client.get)
        await asyncio.sleep(OPENING_S)
        yield got
    finally:
        finished_event.set()
    got[:] = await asyncio.to_thread(client.get)
    reader.join()


def _read(*args: Any) -> None:
    asyncio.run(_watch_page(*args))


async def _watch_page(
    port: int, cookie: str, replica_id: str, count: int, finished: Event, queue: SimpleQueue
) -> None:
    """Opens the pages, says so, and reads until it's ended."""
    got, base = [0, 0], f"ws://127.0.0.1:{port}"
    topics = {"type": "want", "topics": [["now", None], ["history", None], ["requests", None]]}
    wants = (("console", topics), ("kv", {"replica": replica_id, "tenant": ""}))

    async def read(kind: int, socket: ClientConnection) -> None:
        async for _ in socket:
            got[kind] += 1

    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for _ in range(count):
            for kind, (name, want) in enumerate(wants):
                headers = {"Cookie": cookie, "Origin": f"http://127.0.0.1:{port}"}
                socket = await stack.enter_async_context(
                    connect(f"{base}/ws/{name}/", additional_headers=headers, max_size=None)
                )
                await socket.send(json.dumps(want))
                tasks.append(asyncio.create_task(read(kind, socket)))
        queue.put("open")
        await asyncio.to_thread(finished.wait)
        queue.put(got)
        for task in tasks:
            task.cancel()


async def measure(
    args: argparse.Namespace, of: live.Instance, port: int, pid: int, cookie: str, replica_id: str
) -> None:
    """A line of JSON a round and way, and one of the differences."""
    body = {
        "model": "m",
        "stream": True,
        "max_tokens": args.tokens,
        "messages": [{"role": "user", "content": "hello there"}],
    }
    target = Target("127.0.0.1", port, of.key, body)
    level, pause_s = args.connections, 2 * args.connections / args.rate
    firsts: dict[str, list[float]] = {"raw": [], "alone": [], "consoles": []}
    await run_level(target, level, 1.0, pause_s)
    for _ in range(args.rounds):
        for way, timings_of_way in firsts.items():
            count = args.consoles if way == "consoles" else 0
            async with consoles(port, cookie, replica_id, count) as got:
                initial_cpu_seconds = cpu_seconds(pid)
                timings: Timings
                if way == "raw":
                    timings = await run_raw_level(
                        of.redis_url, replica_id, level, args.seconds, args.tokens, pause_s
                    )
                else:
                    timings = await run_level(target, level, args.seconds, pause_s)
                core = (cpu_seconds(pid) - initial_cpu_seconds) / timings.wall
            timings_of_way += timings.first
            row = {"way": way, "core": round(core, 3), "frames": got} | timings.summary()
            print(json.dumps(row), flush=True)
    for way, timings_of_way in firsts.items():
        row = {"way": f"{way}, all", "requests": len(timings_of_way)}
        for percent in (50, 90, 99):
            row[f"p{percent}_ms"] = percentile(timings_of_way, percent)
            raw = percentile(firsts["raw"], percent)
            row[f"added_p{percent}_ms"] = round(percentile(timings_of_way, percent) - raw, 2)
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--consoles", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1, help="of each answer")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.inference.bench.instant_replica") as replica,
        live.gateway(of, "uvicorn") as (port, child),
        blocks(of.redis_url, f"instant-{replica.pid}"),
    ):
        process = subprocess.run(
            [sys.executable, "-c", SESSION],
            env=of.environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        cookie = process.stdout.split()[-1]
        asyncio.run(measure(args, of, port, child.pid, cookie, f"instant-{replica.pid}"))


if __name__ == "__main__":
    main()
