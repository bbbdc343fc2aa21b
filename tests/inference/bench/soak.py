"""Memory of a gateway process over many requests of all kinds: it must not grow.

python -m tests.inference.bench.soak [--requests 50000] [--concurrency 32]

Whole answers, streams, streams that their client leaves, and requests that are refused, mixed.
Resident memory is shown after each tenth; the exit status is 1 when it grew by more than
`--most-mib` after the first fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.inference import live
from tests.inference.bench.__main__ import memory_mib

CHAT = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "hello there"}]}
#: Kind -> how many of a hundred, body, expected status.
KINDS: dict[str, tuple[int, bytes, int]] = {
    "whole": (35, json.dumps(CHAT).encode(), 200),
    "streamed": (35, json.dumps(CHAT | {"stream": True}).encode(), 200),
    "left": (15, json.dumps(CHAT | {"stream": True, "max_tokens": 2000}).encode(), 200),
    "no JSON": (4, b'{"model": "m", ', 400),
    "bad value": (4, json.dumps(CHAT | {"temperature": -1}).encode(), 400),
    "no such model": (4, json.dumps(CHAT | {"model": "nothing"}).encode(), 404),
    "no key": (3, json.dumps(CHAT).encode(), 401),
}


class Soak:
    """Sends the mix over kept-alive connections."""

    def __init__(self, port: int, key: str, requests: int, seed: int) -> None:
        self.port, self.key, self.num_remaining = port, key, requests
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)

    async def worker(self) -> None:
        """Ask until all is asked."""
        reader = writer = None
        names, shares = list(KINDS), [share for share, _, _ in KINDS.values()]
        while self.num_remaining > 0:
            self.num_remaining -= 1
            kind = self._random.choices(names, shares)[0]
            if reader is None or writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            head = await self._send(kind, reader, writer)
            if kind == "left" or "connection: close" in head:
                writer.close()
                reader = writer = None
            else:
                await _read_body(reader, head)
            self.done[kind] += 1
        if writer is not None:
            writer.close()

    async def _send(
        self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        _, body, status = KINDS[kind]
        auth = "" if kind == "no key" else f"Authorization: Bearer {self.key}\r\n"
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{auth}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not head.startswith(f"http/1.1 {status}"):
            raise RuntimeError(f"{kind}: {head}")
        return head


async def _read_body(reader: asyncio.StreamReader, head: str) -> None:
    if "content-length:" in head:
        await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        await reader.readexactly(size + 2)
    await reader.readline()


async def soak(port: int, pid: int, key: str, requests: int, concurrency: int) -> list[int]:
    """Resident MiB after each tenth."""
    sizes = []
    for tenth in range(1, 11):
        started, part = time.perf_counter(), Soak(port, key, requests // 10, tenth)
        await asyncio.gather(*(part.worker() for _ in range(concurrency)))
        sizes.append(memory_mib(pid))
        seconds = round(time.perf_counter() - started, 1)
        row = {"requests": requests * tenth // 10, "mib": sizes[-1], "seconds": seconds}
        print(json.dumps(row | dict(part.done)), flush=True)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--most-mib", type=int, default=8, help="growth that is still flat")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.inference.bench.instant_replica"),
        live.gateway(of, "uvicorn") as (port, child),
    ):
        sizes = asyncio.run(soak(port, child.pid, of.key, args.requests, args.concurrency))
    grown = sizes[-1] - sizes[1]
    print(json.dumps({"mib_after_a_fifth": sizes[1], "mib_at_the_end": sizes[-1]}))
    sys.exit(grown > args.most_mib)


if __name__ == "__main__":
    main()
