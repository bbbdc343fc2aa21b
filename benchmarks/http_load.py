"""Streaming load against any OpenAI-compatible server, with the standard library alone.

Closed loop: `concurrency` workers each keep one request in flight. Open loop: requests start at
random times with a mean rate. Prompts are token ids on /v1/completions.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

from benchmarks.statistics import spread_ms
from benchmarks.workload import Job
from engine.contract.errors import QuireError


class ServerFailed(QuireError):
    """The server can't be reached, or refuses; the message says what it said."""


class Later(ServerFailed):
    """The server is full, and says in how many seconds to ask again."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(slots=True)
class Target:
    """Where the load goes. `again`: ask again when the server says "later", as SDKs do."""

    url: SplitResult
    model: str
    api_key: str = ""
    again: bool = False


@dataclass(slots=True)
class Sample:
    """One answered request: seconds to the first text, between texts, and in all."""

    ttft: float
    gaps: list[float]
    tokens: int
    total: float
    prompt_tokens: int = 0

    @property
    def tpot(self) -> float:
        """Seconds for each output token after the first."""
        return sum(self.gaps) / (self.tokens - 1)


#: Called after each request with the number of those that are answered or failed.
OnFinished = Callable[[int], None]


def ignore(num_finished: int) -> None:
    """The progress is shown nowhere."""


@dataclass(slots=True)
class Results:
    """What a run gathered."""

    on_finished: OnFinished = ignore
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    #: Seconds of each "later" that was followed.
    waits: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """The figures of the run."""
        tokens = sum(sample.tokens for sample in self.samples)
        later = {"refused": len(self.waits), **spread_ms("retry_after", self.waits)}
        return {
            "completed": len(self.samples),
            "failed": len(self.failures),
            "seconds": round(self.seconds, 2),
            "output_tokens": tokens,
            "prompt_tokens": sum(sample.prompt_tokens for sample in self.samples),
            "requests_s": round(len(self.samples) / self.seconds, 2),
            "output_tok_s": round(tokens / self.seconds, 1),
            **spread_ms("ttft", [sample.ttft for sample in self.samples]),
            **spread_ms("itl", [gap for sample in self.samples for gap in sample.gaps]),
            **spread_ms("tpot", [sample.tpot for sample in self.samples if sample.tokens > 1]),
            **spread_ms("e2e", [sample.total for sample in self.samples]),
            **(later if self.waits else {}),
        }


async def closed_loop(
    target: Target, jobs: list[Job], concurrency: int, on_finished: OnFinished = ignore
) -> Results:
    """`concurrency` requests in flight until the jobs are spent."""
    results, queue = Results(on_finished), list(reversed(jobs))

    async def worker() -> None:
        while queue:
            await _measured(target, queue.pop(), results)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    results.seconds = time.perf_counter() - start
    return results


async def open_loop(
    target: Target, jobs: list[Job], rate: float, seed: int = 0, on_finished: OnFinished = ignore
) -> Results:
    """Poisson arrivals at `rate` requests a second."""
    results, rng = Results(on_finished), random.Random(seed)
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
        while True:
            try:
                results.samples.append(await _request(target, job))
                return
            except Later as later:
                if not target.again:
                    raise
                results.waits.append(later.seconds)
                await asyncio.sleep(later.seconds)
    except ServerFailed as error:
        results.failures.append(error.message)
    except (OSError, RuntimeError, ValueError, asyncio.IncompleteReadError) as error:
        results.failures.append(f"{type(error).__name__}: {error}"[:300])
    finally:
        results.on_finished(len(results.samples) + len(results.failures))


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
    reader, writer = await _send(target, "POST", "/v1/completions", body)
    try:
        stamps, tokens = await _read_stream(reader)
    finally:
        writer.close()
    if not stamps:
        raise RuntimeError("No text was streamed.")
    gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    return Sample(
        ttft=stamps[0] - start,
        gaps=gaps,
        tokens=tokens or len(stamps),
        total=time.perf_counter() - start,
        prompt_tokens=len(job.prompt_token_ids),
    )


async def first_model(target: Target) -> str:
    """The name of the first model that the server lists. Raises `ServerFailed`."""
    reader, writer = await _send(target, "GET", "/v1/models")
    try:
        chunked = await _read_head(reader)
        text = b"".join([line async for line in _lines(reader, chunked)])
    finally:
        writer.close()
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ServerFailed("The server lists no model at /v1/models: give --model.") from error


async def _send(
    target: Target, method: str, path: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with the request sent. Raises `ServerFailed` where nobody listens."""
    url, secure = target.url, target.url.scheme == "https"
    port = url.port or (443 if secure else 80)
    try:
        reader, writer = await asyncio.open_connection(
            url.hostname, port, limit=1 << 22, ssl=secure or None
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ServerFailed(
            f"No server answers at {url.geturl()} ({reason}); `manage.py up` starts one."
        ) from error
    key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    writer.write(
        f"{method} {url.path.rstrip('/')}{path} HTTP/1.1\r\n"
        f"Host: {url.netloc}\r\nContent-Type: application/json\r\n{key}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )
    return reader, writer


async def _read_stream(reader: asyncio.StreamReader) -> tuple[list[float], int]:
    """(when each text came, the usage's completion tokens)."""
    chunked = await _read_head(reader)
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


async def _read_head(reader: asyncio.StreamReader) -> bool:
    """Whether the body is chunked. Raises `ServerFailed` for any status but 200."""
    status = (await reader.readline()).decode("utf-8", "replace").strip()
    chunked, seconds = False, ""
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin1").lower().partition(":")
        chunked |= name == "transfer-encoding" and "chunked" in value
        seconds = value.strip() if name == "retry-after" else seconds
    if " 200 " in f"{status} ":
        return chunked
    body = " ".join([(line.decode("utf-8", "replace")) async for line in _lines(reader, chunked)])
    reason = _reason(status, body)
    if seconds.isdigit() and status.partition(" ")[2][:3] in ("429", "503"):
        raise Later(reason, float(seconds))
    raise ServerFailed(reason)


def _reason(status: str, body: str) -> str:
    """What a refusal says, in one line; with a hint where the key is the matter."""
    code = status.partition(" ")[2] or "nothing"
    try:
        body = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        body = body[:300]
    hint = " Give --api-key, or set QUIRE_API_KEY." if code.startswith("401") else ""
    return f"The server answered {code}: {body}{hint}"


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
