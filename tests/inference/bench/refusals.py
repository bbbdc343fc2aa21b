"""What a request takes that is refused because too many wait: a gateway's processor time.

python -m tests.inference.bench.refusals [--count 2000] [--at-once 16] [--rounds 3]

A replica without a model says that a thousand requests wait. Clients ask over a new connection
each, and over one that they keep. Shown are the gateway's milliseconds of processor time a refusal,
its threads' included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from tests.inference import live

TICKS = os.sysconf("SC_CLK_TCK")
MODULE = "tests.inference.bench.instant_replica"


def _request(key: str, connection: str) -> bytes:
    body = json.dumps(
        {"model": "m", "prompt": "a ship and a river " * 5, "max_tokens": 32, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _answer(reader: asyncio.StreamReader) -> int:
    """Reads one; its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").lower()
    length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
    await reader.readexactly(int(length.split(":")[1]))
    return int(head.split()[1])


async def _ask(port: int, key: str, count: int, *, keep: bool) -> None:
    request = _request(key, "keep-alive" if keep else "close")
    reader, writer = None, None
    for _ in range(count):
        if reader is None or writer is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        status = await _answer(reader)
        if status != 503:
            raise RuntimeError(f"the answer was {status}")
        if not keep:
            writer.close()
            reader = writer = None
    if writer is not None:
        writer.close()


def _spent(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(stat[11]) + int(stat[12])) / TICKS


async def _flood(port: int, key: str, args: argparse.Namespace, *, keep: bool) -> None:
    count = args.count // args.at_once
    await asyncio.gather(*(_ask(port, key, count, keep=keep) for _ in range(args.at_once)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, MODULE, "--waiting", "1000"),
        live.gateway(of, "uvicorn") as (port, process),
    ):
        time.sleep(2)  # until the gateway has heard how many wait
        for number in range(args.rounds):
            for keep in (False, True):
                initial = _spent(process.pid)
                asyncio.run(_flood(port, of.key, args, keep=keep))
                spent = 1000 * (_spent(process.pid) - initial) / args.count
                kind = "one connection" if keep else "a connection each"
                print(json.dumps({"round": number, "by": kind, "cpu_ms": round(spent, 3)}))


if __name__ == "__main__":
    main()
