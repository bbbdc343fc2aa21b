"""Where a request's time goes inside a gateway, stage by stage, at 1 and at 64 connections.

python -m tests.inference.bench.spans [--concurrency 1,64] [--pace-ms 0] [--tokens 16]

The gateway runs as it is; a prelude wraps the functions at which a stage ends. A stage's time is
the clock's, so at 64 connections it holds what other requests do meanwhile on the same loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.inference import live
from tests.inference.bench.load import Target, run_level
from tests.waiting import free_port

#: Runs in the gateway before it serves. The mailbox ties the loop that reads to the request.
_PRELUDE = """
import contextvars, functools, json, os, signal, time
from pathlib import Path
marks = contextvars.ContextVar("marks", default=None)
by_mailbox, rows = {}, []

def stamp(name, row=None):
    row = marks.get() if row is None else row
    if row is not None:
        row.setdefault(name, time.perf_counter())

def after(owner, attribute, name):
    work = getattr(owner, attribute)
    @functools.wraps(work)
    async def stamped(*args, **kwargs):
        found = await work(*args, **kwargs)
        stamp(name)
        return found
    setattr(owner, attribute, stamped)

def after_sync(owner, attribute, name):
    work = getattr(owner, attribute)
    @functools.wraps(work)
    def stamped(*args, **kwargs):
        found = work(*args, **kwargs)
        stamp(name)
        return found
    setattr(owner, attribute, stamped)

import config.asgi
from inference.chat import turn
from inference.engine_client import client, mailbox
from inference.generation import generation
from inference.api import chat
from inference.web.views import GatewayView
from uvicorn.protocols.http import httptools_impl as http

class Stamped(http.RequestResponseCycle):
    async def run_asgi(self, app):
        row = {"task begins": time.perf_counter()}
        row["request read"] = self.read_at
        marks.set(row)
        await super().run_asgi(app)
        row["answer ends"] = time.perf_counter()
        rows.append(row)
    def __init__(self, *args, **kwargs):
        self.read_at = time.perf_counter()
        super().__init__(*args, **kwargs)
    async def send(self, message):
        await super().send(message)
        if message["type"] == "http.response.body":
            stamp("first bytes written")
http.RequestResponseCycle = Stamped
after(GatewayView, "_admit", "key checked")
after_sync(chat, "parse", "body checked")
after(turn, "find_served", "model found")
after(turn, "chat_job", "rendered")
after(generation, "admit", "limits passed")
submit = client.EngineClient.submit
def submitted(self, requests, model, **more):
    found = submit(self, requests, model, **more)
    stamp("sent to the engine")
    by_mailbox[id(found.mailbox)] = marks.get()
    return found
client.EngineClient.submit = submitted
put = mailbox.TokenQueue.put
def arrived(self, piece):
    row = by_mailbox.pop(id(self), None)
    if row is not None:
        stamp("first token arrives", row)
    put(self, piece)
mailbox.TokenQueue.put = arrived

def show(*_):
    Path(os.environ["SPANS"]).write_text(json.dumps(rows))
    rows.clear()
signal.signal(signal.SIGUSR1, show)
"""
STAGES = (
    *("request read", "task begins", "key checked", "body checked", "model found", "rendered"),
    *("limits passed", "sent to the engine", "first token arrives", "first bytes written"),
    "answer ends",
)
ENGINES = "first token arrives"


def report(rows: list[dict[str, float]], stream: bool, level: int) -> None:
    """One line of JSON: microseconds of each stage, the median; and the gateway's own share."""
    full_rows = [row for row in rows if all(stage in row for stage in STAGES)]
    spans: dict[str, float] = {}
    for initial, stage in itertools.pairwise(STAGES):
        spans[stage] = round(statistics.median(r[stage] - r[initial] for r in full_rows) * 1e6)
    median_s = statistics.median(
        r["first bytes written"] - r["request read"] - (r[ENGINES] - r["sent to the engine"])
        for r in full_rows
    )
    row = {"stream": stream, "concurrency": level, "requests": len(full_rows), "us": spans}
    print(json.dumps(row | {"own_us_to_first_bytes": round(median_s * 1e6)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", default="1,64")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    args = parser.parse_args()
    flags = ("--pace-ms", str(args.pace_ms))
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.inference.bench.instant_replica", *flags),
    ):
        path, port = Path(folder) / "spans.json", free_port()
        command = [sys.executable, "-c", _PRELUDE + live.SERVE, str(port)]
        with live.process(command, of.environment | {"SPANS": str(path)}) as child:
            live.wait_until_healthy(port)
            for level in map(int, args.concurrency.split(",")):
                body: dict[str, object] = {
                    "model": "m",
                    "stream": True,
                    "max_tokens": args.tokens,
                    "messages": [{"role": "user", "content": "hello there"}],
                }
                target = Target("127.0.0.1", port, of.key, body)
                pause_s = args.pace_ms * args.tokens / 1000
                asyncio.run(run_level(target, level, 1.0, pause_s))
                rows_after(child.pid, path)
                asyncio.run(run_level(target, level, args.seconds, pause_s))
                report(rows_after(child.pid, path), True, level)


def rows_after(pid: int, path: Path) -> list[dict[str, float]]:
    """What the gateway has noted since it was last asked."""
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while True:
        time.sleep(0.1)
        try:
            rows: list[dict[str, float]] = json.loads(path.read_text())
            return rows
        except (FileNotFoundError, json.JSONDecodeError):
            continue


if __name__ == "__main__":
    main()
