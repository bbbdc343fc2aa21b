"""A small HTTP load generator: kept-alive connections, whole answers and streams."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timings:
    """Of one level: seconds of each request, to its first text chunk and to its end."""

    totals: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    wall: float = 0.0

    def summary(self) -> dict[str, float]:
        return {
            "requests": len(self.totals),
            "req_s": round(len(self.totals) / self.wall, 1),
            "tok_s": round(self.tokens / self.wall),
            "p50_ms": percentile(self.totals, 50),
            "p99_ms": percentile(self.totals, 99),
            "ttft_p50_ms": percentile(self.first, 50),
            "ttft_p99_ms": percentile(self.first, 99),
        }


def percentile(values: list[float], percent: int) -> float:
    """In milliseconds; 0 for no values."""
    ordered = sorted(values) or [0.0]
    return round(1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 2)


@dataclass
class Target:
    """Where to send what."""

    host: str
    port: int
    key: str
    body: dict[str, object]

    def request(self) -> bytes:
        payload = json.dumps(self.body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


async def run_level(
    target: Target, concurrency: int, seconds: float, pause_s: float = 0.0
) -> Timings:
    """`concurrency` connections that ask again and again.

    `pause_s`: each waits up to so long, by chance, before each request, so that they don't march in
    step.
    """
    timings, started = Timings(), time.perf_counter()
    end = started + seconds
    await asyncio.gather(*(_worker(target, timings, end, pause_s) for _ in range(concurrency)))
    timings.wall = time.perf_counter() - started
    return timings


async def _worker(target: Target, timings: Timings, end: float, pause_s: float) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    request = target.request()
    while time.perf_counter() < end:
        await asyncio.sleep(random.uniform(0, pause_s))
        started = time.perf_counter()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(head)
        if target.body["stream"]:
            await _read_stream(reader, timings, started, int(str(target.body["max_tokens"])))
        else:
            answer = await _read_answer(reader, head)
            timings.tokens += answer["usage"]["completion_tokens"]
        timings.totals.append(time.perf_counter() - started)
    writer.close()


async def _read_answer(reader: asyncio.StreamReader, head: str) -> Any:
    if "content-length" in head:
        size = int(head.split("content-length:")[1].split("\r\n")[0])
        return json.loads(await reader.readexactly(size))
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return json.loads(body)


async def _read_stream(
    reader: asyncio.StreamReader, timings: Timings, started: float, tokens: int
) -> None:
    seen = False
    while size := int((await reader.readline()).split(b";")[0], 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        if not seen and b'"content":"' in chunk:
            timings.first.append(time.perf_counter() - started)
            seen = True
    await reader.readline()
    timings.tokens += tokens
