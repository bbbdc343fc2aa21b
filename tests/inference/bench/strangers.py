"""Memory of a gateway process while strangers send it bodies that it shouldn't read.

python -m tests.inference.bench.strangers [--count 100]

Each of `count` connections announces a body of 10 MB without a key that is known, or hides its
length in chunks, or never begins its body, and sends what the server takes. Shown is the resident
memory before, at its highest and afterwards, and how the connections ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.inference import live
from tests.inference.bench.__main__ import memory_mib

SIZE, PART = 10_000_000, 1 << 16
SECONDS = 5.0
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    "Authorization: Bearer nobody-knows-it\r\n"
)
LENGTH, CHUNKED = f"Content-Length: {SIZE}\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n"


async def stranger(port: int, kind: str) -> str:
    """How the server ended it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((HEAD + (CHUNKED if kind == "in chunks" else LENGTH)).encode())
    chunk = b"x" * PART
    if kind == "in chunks":
        chunk = f"{PART:x}\r\n".encode() + chunk + b"\r\n"
    try:
        if kind != "never begun":
            for _ in range(SIZE // PART):
                writer.write(chunk)
                await writer.drain()
        status = await asyncio.wait_for(reader.readline(), SECONDS)
        return status.decode().strip()[9:12] or "closed"
    except TimeoutError:
        return "waits"
    except OSError:
        return "closed"
    finally:
        writer.close()


async def measure(port: int, pid: int, kind: str, count: int) -> dict[str, Any]:
    """All at once."""
    initial_memory_mib = max_memory_mib = memory_mib(pid)
    tasks = [asyncio.create_task(stranger(port, kind)) for _ in range(count)]
    started = time.monotonic()
    while not all(task.done() for task in tasks):
        max_memory_mib = max(max_memory_mib, memory_mib(pid))
        await asyncio.sleep(0.02)
    return {
        "bodies": kind,
        "connections": count,
        "mib_before": initial_memory_mib,
        "mib_most": max_memory_mib,
        "mib_after": memory_mib(pid),
        "seconds": round(time.monotonic() - started, 1),
        "ended": dict(Counter(task.result() for task in tasks)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.inference.bench.instant_replica"),
        live.gateway(of, "uvicorn") as (port, child),
    ):
        for kind in ("announced", "in chunks", "never begun"):
            print(json.dumps(asyncio.run(measure(port, child.pid, kind, args.count))), flush=True)


if __name__ == "__main__":
    main()
