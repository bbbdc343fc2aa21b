"""Streaming load against any OpenAI-compatible server, with the standard library alone.

Closed loop: `concurrency` workers each keep one request in flight. Open loop: requests start at
random times with a mean rate. Prompts are token ids on /v1/completions.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

from engine.bench.statistics import spread_ms
from engine.bench.workload import Job


@dataclass(slots=True)
class Target:
    """Where the load goes."""

    url: SplitResult
    model: str
    api_key: str = ""


@dataclass(slots=True)
class Sample:
    """One answered request: seconds to the first text, between texts, and in all."""

    ttft: float
    gaps: list[float]
    tokens: int
    total: float


@dataclass(slots=True)
class Results:
    """What a run gathered."""

    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """The figures of the run."""
        tokens = sum(sample.tokens for sample in self.samples)
        return {
            "completed": len(self.samples),
            "failed": len(self.failures),
            "seconds": round(self.seconds, 2),
            "output_tokens": tokens,
            "requests_s": round(len(self.samples) / self.seconds, 2),
            "output_tok_s": round(tokens / self.seconds, 1),
            **spread_ms("ttft", [sample.ttft for sample in self.samples]),
            **spread_ms("itl", [gap for sample in self.samples for gap in sample.gaps]),
            **spread_ms("e2e", [sample.total for sample in self.samples]),
        }


async def closed_loop(target: Target, jobs: list[Job], concurrency: int) -> Results:
    """`concurrency` requests in flight until the jobs are spent."""
    results, queue = Results(), list(reversed(jobs))

    async def worker() -> None:
        while queue:
            await _measured(target, queue.pop(), results)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    results.seconds = time.perf_counter() - start
    return results


async def open_loop(target: Target, jobs: list[Job], rate: float, seed: int = 0) -> Results:
    """Poisson arrivals at `rate` requests a second."""
    results, rng = Results(), random.Random(seed)
    tasks = []
    start = time.perf_counter()
    for job in jobs:
        tasks.append(asyncio.create_task(_measured(target, job, results)))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*tasks)
    results.seconds = time.perf_counter() - start
    return results


async def _measured(target: Target, job: Job, results: Results) -> None:
    """Run one job; a failure is counted and shown, never hidden."""
    try:
        results.samples.append(await _request(target, job))
    except (OSError, RuntimeError, ValueError, asyncio.IncompleteReadError) as error:
        results.failures.append(f"{type(error).__name__}: {error}"[:300])


async def _request(target: Target, job: Job) -> Sample:
    body = json.dumps(
        {
            "model": target.model,
            "prompt": job.prompt_token_ids,
            "max_tokens": job.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    start = time.perf_counter()
    host, port = target.url.hostname, target.url.port or 80
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    try:
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        writer.write(
            f"POST {target.url.path.rstrip('/')}/v1/completions HTTP/1.1\r\n"
            f"Host: {target.url.netloc}\r\nContent-Type: application/json\r\n{key}"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        stamps, tokens = await _read_stream(reader)
    finally:
        writer.close()
    if not stamps:
        raise RuntimeError("No text was streamed.")
    gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    return Sample(stamps[0] - start, gaps, tokens or len(stamps), time.perf_counter() - start)


async def _read_stream(reader: asyncio.StreamReader) -> tuple[list[float], int]:
    """(when each text came, the usage's completion tokens)."""
    status = (await reader.readline()).decode()
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line.lower()
    if " 200 " not in status:
        raise RuntimeError(
            status.strip() + " " + (await reader.read(500)).decode("utf-8", "replace")
        )
    stamps: list[float] = []
    tokens = 0
    async for line in _lines(reader, chunked):
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            continue
        event = json.loads(line[5:])
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if any(choice.get("text") for choice in event.get("choices") or []):
            stamps.append(time.perf_counter())
    return stamps, tokens


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body's lines, chunked encoding undone."""
    if not chunked:
        while line := await reader.readline():
            yield line.strip()
        return
    pending = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        pending += await reader.readexactly(size)
        await reader.readexactly(2)
        *lines, pending = pending.split(b"\n")
        for line in lines:
            yield line.strip()
    if pending:
        yield pending.strip()
