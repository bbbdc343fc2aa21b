"""Files that one chat completion crosses in a gateway, from the ASGI entry to its `XADD`.

    python -m tools.request_files MODEL KEY

runs the ASGI application in this process, with the environment of an installation that serves the
model. The first request looks up key, tenant and limits; of the next ones, which find them cached,
only the files that all of them cross are listed, so that background work doesn't count.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = f"{Path(__file__).resolve().parents[1]}/"
NUM_CACHED = 5


class FileRecorder:
    """Profiler of this thread and those that start later: first-party files of called functions."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._recording = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def start(self) -> None:
        """Record until the next `XADD`."""
        self.files, self._recording = set(), True

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self._recording:
            return
        code = frame.f_code
        if code.co_name == "<module>" or not code.co_filename.startswith(ROOT):
            return
        path = code.co_filename.removeprefix(ROOT)
        if not path.startswith((".venv/", "tools/")):
            self.files.add(path)
        if code.co_name == "send" and frame.f_locals.get("words", ("",))[0] == "XADD":
            self._recording = False


async def complete_chat(application: Any, model: str, key: str) -> int:
    """Send one chat completion, and return its status."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", b"application/json"),
        ],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
    }
    events = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    status = 0

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop()
        await asyncio.Future()  # the client stays connected
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    await application(scope, receive, send)
    return status


async def run_lifespan(application: Any) -> Callable[[], Awaitable[None]]:
    """Start the application as a server does. Returns a function that stops it."""
    messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    answers: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    task = asyncio.create_task(application({"type": "lifespan"}, messages.get, answers.put))
    await messages.put({"type": "lifespan.startup"})
    if (answer := await answers.get())["type"] != "lifespan.startup.complete":
        raise SystemExit(answer.get("message", "The application did not start."))

    async def stop() -> None:
        await messages.put({"type": "lifespan.shutdown"})
        await task

    return stop


async def main(model: str, key: str) -> None:
    """Print the files, and how many they are."""
    recorder = FileRecorder()
    sys.path.insert(0, f"{ROOT}platform")
    from config.asgi import application

    stop = await run_lifespan(application)
    await asyncio.sleep(2)  # the replicas' heartbeats are read
    recorded = []
    for _ in range(1 + NUM_CACHED):
        recorder.start()
        if (status := await complete_chat(application, model, key)) != 200:
            raise SystemExit(f"The completion was answered with {status}.")
        recorded.append(recorder.files)
    await stop()
    cached = set.intersection(*recorded[1:])
    print("\n".join(sorted(cached)))
    print(f"{len(cached)} files; the first request crossed {len(recorded[0])}:")
    print("\n".join(sorted(recorded[0] - cached)))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    asyncio.run(main(*sys.argv[1:]))
