"""Sends a file of requests to a server, and runs a private server for that where needed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
from django.conf import settings

from engine.contract.errors import InvalidRequest
from inference.api.batches.files import parse_line
from inference.request.context import new_id

#: Statuses that mean "retry later". Requests are retried after the time that the response names.
LATER = frozenset({429, 503})
MAX_TRIES = 20
START_TIMEOUT_S = 600.0


class NoServer(RuntimeError):
    """The server that was started for the batch isn't serving."""


@dataclass
class Totals:
    """Counts of the results of a file's requests."""

    completed: int = 0
    failed: int = 0


class BatchClient:
    """Sends a batch's requests to a server concurrently.

    Args:
        url: base URL without `/v1`. concurrency: maximum number of concurrent requests.
    """

    def __init__(self, url: str, api_key: str, concurrency: int, *, verify: bool = True) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=concurrency)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            limits=limits,
            timeout=None,  # noqa: S113 - an answer may take arbitrarily long
            verify=verify,
        )
        self._concurrency = concurrency

    async def run(self, lines: Iterable[bytes], output: IO[str]) -> Totals:
        """Yield a result for every line that isn't blank, in the order of completion.

        Raises: httpx.TransportError when the server can't be reached.
        """
        totals, todo = Totals(), (line for line in lines if line.strip())

        async def work() -> None:
            for line in todo:
                result = await self._result(line)
                good = (result["response"] or {}).get("status_code") == 200
                totals.completed += good
                totals.failed += not good
                output.write(json.dumps(result, ensure_ascii=False) + "\n")

        async with self._client, asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(work())
        return totals

    async def _result(self, line: bytes) -> dict[str, Any]:
        result: dict[str, Any] = {"id": new_id("batch_req"), "custom_id": None}
        try:
            request = parse_line(line)
            result["custom_id"] = request.get("custom_id")
            url, body = _checked(request)
        except InvalidRequest as error:
            error_body = {"code": error.code, "message": error.message}
            return result | {"response": None, "error": error_body}
        answer = await self._ask(url, body)
        response = {
            "status_code": answer.status_code,
            "request_id": answer.headers.get("x-request-id", ""),
            "body": _body(answer),
        }
        return result | {"response": response, "error": None}

    async def _ask(self, url: str, body: dict[str, Any]) -> httpx.Response:
        for _ in range(MAX_TRIES):
            answer = await self._client.post(url, json=body)
            if answer.status_code not in LATER:
                break
            await asyncio.sleep(float(answer.headers.get("retry-after-ms", "1000")) / 1000)
        return answer


def _body(answer: httpx.Response) -> Any:
    """Return the response's JSON, or an error with the text of a proxy that sent no JSON."""
    try:
        return answer.json()
    except ValueError:
        return {"error": {"message": answer.text[:1000], "code": "no_json"}}


def _checked(request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a line's path and body. Raises `InvalidRequest`."""
    url, body = request.get("url"), request.get("body")
    if not isinstance(request.get("custom_id"), str):
        raise InvalidRequest("custom_id must be a string.", param="custom_id")
    if request.get("method") != "POST":
        raise InvalidRequest("method must be 'POST'.", param="method")
    if not isinstance(url, str) or not url.startswith("/v1/") or ".." in url:
        raise InvalidRequest("url must be an endpoint, such as /v1/chat/completions.", param="url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be a JSON object.", param="body")
    if body.get("stream") or body.get("background"):
        raise InvalidRequest("A batch's requests are answered in one body.", param="body.stream")
    return url, body


@contextmanager
def private_server(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Run a private instance (own data dir, own Redis, one replica); yield its URL and API key.

    Raises: `NoServer` with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="quire-batch-") as name:
        folder = Path(name)
        ready, log = folder / "ready.json", folder / "log"
        command = ["-m", "quire", "up", "--port", "0", "--no-worker", "--ready-file", str(ready)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command, "--data-dir", str(folder / "data"), *flags],
                cwd=settings.BASE_DIR,
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            server = _await(process, ready, log)
            yield server["url"], server["api_key"]
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    """Return the environment without the variables that point to other instances."""
    dropped = (
        *("DATABASE_URL", "REDIS_URL", "QUIRE_DATA_DIR", "QUIRE_KEY_PREFIX", "QUIRE_STORAGE_DIR"),
    )
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _await(process: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if ready.exists():
            server: dict[str, str] = json.loads(ready.read_text(encoding="utf-8"))
            return server
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise NoServer(log.read_text(encoding="utf-8", errors="replace")[-2000:].strip())
